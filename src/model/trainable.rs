//! What is trained: attaching adapters, and the trainable parameters as flat f32 vectors in one
//! fixed order (the module's own), which is all that optimizers, checkpoints and ranks see.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::store::ModuleSnapshot;
use burn::tensor::{DType, Gradients, Tensor};
use xxhash_rust::xxh3::Xxh3;

use super::lora::{Adapter, Linear, LoraReport, LoraSpec, Run};
use super::{Decoder, Modules, Resolved, resolve};
use crate::error::{Error, Problem, Result};

/// One trainable parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct Trainable {
    /// Its path in the module.
    pub name: String,
    /// Its identity in Burn.
    pub id: ParamId,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// How many parameters there are; a tied head counts once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ParameterCounts {
    /// All, adapters included.
    pub total: usize,
    /// Those that are trained.
    pub trainable: usize,
}

impl Decoder {
    /// Freezes the base and attaches one adapter per run, replacing those that are attached.
    ///
    /// A's initial values depend on the seed and the module's name, not on the other runs, the order or the
    /// device. Without runs the model is frozen whole.
    ///
    /// # Errors
    /// Every target, pattern and number that does not hold, together; the decoder is then as it was.
    pub fn attach_lora(&mut self, runs: &[LoraSpec], seed: u64) -> Result<LoraReport> {
        let runs: Vec<_> = runs.iter().map(|spec| (spec.clone(), seed)).collect();
        self.attach_runs(&runs)
    }

    /// [`Decoder::attach_lora`] with a seed for each run.
    ///
    /// # Errors
    /// As there.
    pub fn attach_runs(&mut self, runs: &[(LoraSpec, u64)]) -> Result<LoraReport> {
        let mut decoder = self.clone().frozen();
        let (mut problems, mut warnings) = (Vec::new(), Vec::new());
        for (run, (spec, seed)) in runs.iter().enumerate() {
            match decoder.attach(spec, *seed) {
                Ok(found) => warnings.extend(found),
                Err(found) => problems.extend(found.into_iter().map(|p| in_run(p, run, runs.len()))),
            }
        }
        if !problems.is_empty() {
            return Err(Error::Config(problems));
        }
        *self = decoder;
        Ok(LoraReport {
            modules: self.runs.iter().map(|run| run.modules.len()).sum(),
            parameters: self.parameter_counts().trainable,
            warnings,
        })
    }

    /// Attaches one more run to those that are there.
    ///
    /// # Errors
    /// As [`Decoder::attach_lora`]; the decoder is then as it was.
    pub fn attach_one_more(&mut self, spec: &LoraSpec, seed: u64) -> Result<Vec<String>> {
        let mut decoder = self.clone();
        let warnings = decoder.attach(spec, seed).map_err(Error::Config)?;
        *self = decoder;
        Ok(warnings)
    }

    /// Attaches one more run; returns warnings.
    pub(crate) fn attach(&mut self, spec: &LoraSpec, seed: u64) -> Result<Vec<String>, Vec<Problem>> {
        let Resolved { modules, saved, mut warnings } = resolve(spec, &self.modules())?;
        if !saved.is_empty() && !self.runs.is_empty() || self.runs.iter().any(|run| !run.saved.is_empty()) {
            let message = "`modules_to_save` trains one copy of a module: it needs a run of its own".into();
            return Err(vec![Problem { place: String::new(), message, hint: String::new() }]);
        }
        warnings.extend(self.untie_where_needed(modules.iter().any(|m| m.name == "lm_head"), &saved));
        let device = self.device();
        for (name, linear) in self.linears_mut() {
            let module = modules.iter().find(|module| module.name == name);
            let adapter = module
                .map(|module| Adapter::new(spec, module, linear.weight.lazy_shape().dims(), seed, &device));
            linear.adapters.push(adapter);
        }
        let of_saved = |path: &str| saved.iter().any(|m| path.rsplit_once('.').is_some_and(|(p, _)| p == m));
        *self = self.clone().map_named(|path, train| train || of_saved(path));
        self.runs.push(Run { spec: spec.clone(), modules, saved });
        Ok(warnings)
    }

    /// A tied head that is adapted or trained whole becomes a head of its own (as in PEFT, where
    /// the two are separate modules); the weights stay shared in memory until one is trained.
    fn untie_where_needed(&mut self, head_adapted: bool, saved: &[String]) -> Option<String> {
        let saves = |name: &str| saved.iter().any(|m| m == name);
        let needed = head_adapted || saves("lm_head") || saves("model.embed_tokens");
        if self.lm_head.is_some() || !needed {
            return None;
        }
        let weight = Param::initialized(ParamId::new(), self.model.embed_tokens.weight.val());
        let adapters = vec![None; self.runs.len()];
        self.lm_head = Some(Linear { weight, bias: None, adapters });
        Some(
            "this model's output head is its embedding (`tie_word_embeddings`): adapting one of the two unties \
             them; a merged model will hold both, and llama.cpp does not load such an adapter"
                .into(),
        )
    }

    /// Trains every parameter (full fine-tuning); adapters are dropped.
    #[must_use]
    pub fn train_all(self) -> Self {
        self.frozen().map_named(|_, _| true)
    }

    /// Without adapters and with nothing trainable.
    fn frozen(mut self) -> Self {
        for (_, linear) in self.linears_mut() {
            linear.adapters.clear();
        }
        self.runs.clear();
        self.map_named(|_, _| false)
    }

    /// Makes each parameter trainable or not, by its path and whether it is now.
    fn map_named(self, wanted: impl Fn(&str, bool) -> bool) -> Self {
        self.map(&mut SetTrainable { path: Vec::new(), wanted }).unstacked()
    }

    /// The linear layers with their names, in module order.
    pub(super) fn linears_mut(&mut self) -> Vec<(String, &mut Linear)> {
        let mut linears = Vec::new();
        for (i, layer) in self.model.layers.iter_mut().enumerate() {
            let (attn, mlp) = (&mut layer.self_attn, &mut layer.mlp);
            let parts = [
                ("self_attn.q_proj", &mut attn.q_proj),
                ("self_attn.k_proj", &mut attn.k_proj),
                ("self_attn.v_proj", &mut attn.v_proj),
                ("self_attn.o_proj", &mut attn.o_proj),
                ("mlp.gate_proj", &mut mlp.gate_proj),
                ("mlp.up_proj", &mut mlp.up_proj),
                ("mlp.down_proj", &mut mlp.down_proj),
            ];
            linears.extend(parts.map(|(name, linear)| (format!("model.layers.{i}.{name}"), linear)));
        }
        linears.extend(self.lm_head.iter_mut().map(|head| ("lm_head".to_string(), head)));
        linears
    }

    /// Name and shape of every parameter of the base, in module order.
    pub(crate) fn base_parameters(&self) -> Vec<(String, Vec<usize>)> {
        let mut all = Vec::new();
        each_float(self, |path, shape, _| {
            if !path.contains(".adapters.") {
                all.push((path.to_string(), shape.to_vec()));
            }
        });
        all
    }

    /// A hash of names and bytes of the base's parameters: the same before and after a LoRA run.
    ///
    /// # Errors
    /// Where a parameter cannot be read from the device.
    pub fn base_hash(&self) -> Result<u64> {
        let mut hash = Xxh3::new();
        for tensor in self.collect(None, None, false).iter().filter(|t| !t.name.contains(".adapters.")) {
            let unreadable = |cause| Error::device(format!("cannot read `{}`: {cause}", tensor.name), "");
            hash.update(tensor.name.as_bytes());
            hash.update(&tensor.to_bytes().map_err(|e| unreadable(e.to_string()))?);
        }
        Ok(hash.digest())
    }

    /// The names of the modules that hold parameters, for PEFT's matching rules.
    pub(crate) fn modules(&self) -> Modules {
        Modules::from_parameters(self.base_parameters().iter().map(|(name, _)| name.as_str()))
    }

    /// The trainable parameters, in module order.
    pub fn trainable(&self) -> Vec<Trainable> {
        let mut all = Vec::new();
        self.visit(&mut Walk { path: Vec::new(), visit: Named(&mut all) });
        all
    }

    /// Their values, flattened, without autodiff; in the same order.
    pub fn trainable_values(&self) -> Vec<Tensor<1>> {
        let mut values = Values(Vec::new());
        self.visit(&mut values);
        values.0
    }

    /// Takes their gradients out of `gradients`, flattened; `None` where one took no part in the
    /// loss. In the same order.
    pub fn take_grads(&self, gradients: &mut Gradients) -> Vec<Option<Tensor<1>>> {
        let mut taker = TakeGrads { gradients, taken: Vec::new() };
        self.visit(&mut taker);
        taker.taken
    }

    /// The places in that order of what an adapter run trains: its adapters; what is trained whole is the first run's.
    pub fn trainable_of(&self, run: usize) -> Vec<usize> {
        self.trainable_of_runs().get(run).cloned().unwrap_or_default()
    }

    /// [`Decoder::trainable_of`] of each run.
    pub fn trainable_of_runs(&self) -> Vec<Vec<usize>> {
        let mut places = vec![Vec::new(); self.runs.len().max(1)];
        for (n, parameter) in self.trainable().iter().enumerate() {
            let adapter = parameter.name.split_once(".adapters.").map(|(_, rest)| rest);
            let run = adapter.and_then(|rest| rest.split('.').next()).and_then(|run| run.parse().ok());
            places[run.unwrap_or(0)].push(n);
        }
        places
    }

    /// Replaces their values (flattened, in the same order); each is a fresh leaf.
    ///
    /// # Panics
    /// Where there are not as many values as trainable parameters.
    #[must_use]
    pub fn set_trainable(self, values: Vec<Tensor<1>>) -> Self {
        let mut mapper = SetValues { values: values.into_iter() };
        let decoder = self.map(&mut mapper);
        assert!(mapper.values.next().is_none(), "more values than trainable parameters");
        decoder.unstacked()
    }

    /// Number of parameters, and of those that are trained.
    pub fn parameter_counts(&self) -> ParameterCounts {
        let mut counts = ParameterCounts::default();
        each_float(self, |_, shape, trained| {
            let n: usize = shape.iter().product();
            counts.total += n;
            counts.trainable += if trained { n } else { 0 };
        });
        counts
    }
}

fn in_run(mut problem: Problem, run: usize, runs: usize) -> Problem {
    if runs > 1 {
        problem.message = format!("run {run}: {}", problem.message);
    }
    problem
}

/// Path, shape and whether it is trained, of every parameter.
fn each_float(decoder: &Decoder, visit: impl FnMut(&str, &[usize], bool)) {
    decoder.visit(&mut Walk { path: Vec::new(), visit: Described(visit) });
}

/// What a [`Walk`] does at a parameter.
trait Visit {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>);
}

struct Described<F>(F);

impl<F: FnMut(&str, &[usize], bool)> Visit for Described<F> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let trained = param.is_initialized() && param.is_require_grad();
        (self.0)(path, &param.lazy_shape(), trained);
    }
}

struct Named<'a>(&'a mut Vec<Trainable>);

impl Visit for Named<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            let shape = param.lazy_shape().to_vec();
            self.0.push(Trainable { name: path.into(), id: param.id, shape });
        }
    }
}

/// The trainable values.
struct Values(Vec<Tensor<1>>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            self.0.push(flat(param.val().inner()));
        }
    }
}

fn flat<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let n = x.shape().num_elements();
    x.reshape([n])
}

/// Visits parameters with their paths.
struct Walk<V> {
    path: Vec<String>,
    visit: V,
}

impl<V: Visit> ModuleVisitor for Walk<V> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.visit.visit(&self.path.join("."), param);
    }
}

struct TakeGrads<'a> {
    gradients: &'a mut Gradients,
    taken: Vec<Option<Tensor<1>>>,
}

impl ModuleVisitor for TakeGrads<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            let grad = param.val().grad_remove(self.gradients);
            self.taken.push(grad.map(flat));
        }
    }
}

struct SetValues {
    values: std::vec::IntoIter<Tensor<1>>,
}

impl ModuleMapper for SetValues {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        let value = self.values.next().expect("as many values as trainable parameters");
        let value = value.inner().reshape::<D, _>(param.lazy_shape());
        Param::initialized(param.id, value.autodiff().require_grad())
    }
}

struct SetTrainable<F> {
    path: Vec<String>,
    wanted: F,
}

impl<F: Fn(&str, bool) -> bool> ModuleMapper for SetTrainable<F> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let trained = param.is_initialized() && param.is_require_grad();
        match ((self.wanted)(&self.path.join("."), trained), trained) {
            (true, false) => {
                let value = param.val().inner().cast(DType::F32).autodiff();
                Param::initialized(param.id, value.require_grad())
            }
            (false, true) => Param::initialized(param.id, param.val().inner()),
            _ => param,
        }
    }
}
