//! Weights that are trained in f32 and computed with in bf16: rounded once for all passes of a step.
//!
//! Rounding them where they are used costs a cast a tensor in each pass and one for its gradient: 620 small ops for 28
//! layers, more than the host makes while a card works on a row of 4,096 tokens.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor};

use super::Decoder;
use crate::ops;

impl Decoder {
    /// The decoder as the passes of a step take it: what it holds in another type than the one that it computes in is
    /// rounded to that, and so are its gradients ([`Decoder::take_grads`]).
    ///
    /// Not the embedding: where it is the head as well, its gradients add up in f32. Not adapters: ops take them in f32.
    #[must_use]
    pub fn rounded(&self) -> Self {
        let embedding = self.model.embed_tokens.weight.id;
        let mut unlike =
            Unlike { dtype: self.dtype, embedding, adapters: 0, ids: Vec::new(), values: Vec::new() };
        self.visit(&mut unlike);
        let rounded = ops::cast_each(unlike.values, self.dtype);
        match rounded.is_empty() {
            true => self.clone(),
            false => self.clone().map(&mut Replace(unlike.ids.into_iter().zip(rounded).collect())),
        }
    }
}

/// The parameters of another type, flattened.
struct Unlike {
    dtype: DType,
    embedding: ParamId,
    /// How many modules around the visited one are called so.
    adapters: usize,
    ids: Vec<ParamId>,
    values: Vec<Tensor<1>>,
}

impl ModuleVisitor for Unlike {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.adapters += usize::from(name == "adapters");
    }

    fn exit_module(&mut self, name: &str, _container: &str) {
        self.adapters -= usize::from(name == "adapters");
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.adapters > 0 || param.id == self.embedding {
            return;
        }
        let value = param.val();
        if value.dtype() != self.dtype {
            let n = value.shape().num_elements();
            self.ids.push(param.id);
            self.values.push(value.inner().reshape([n]));
        }
    }
}

struct Replace(HashMap<ParamId, Tensor<1>>);

impl ModuleMapper for Replace {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(value) = self.0.remove(&param.id) else { return param };
        let value = value.reshape::<D, _>(param.lazy_shape());
        let value = if param.is_require_grad() { value.autodiff().require_grad() } else { value };
        Param::initialized(param.id, value)
    }
}
