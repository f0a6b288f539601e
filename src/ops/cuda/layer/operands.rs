//! The tensors of a layer, in the order of the parents of its tape node.

use burn::backend::autodiff::ops::NodeGuard;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Cube, TensorMetadata};
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::super::gemm::Matrix;
use super::super::tensor::{known_matrix, rows};
use super::group::Group;
use crate::ops::{DecoderLayer, LoraPart, Projection};

/// Number of linear layers: q, k, v, o, gate, up, down.
pub const PROJECTIONS: usize = 7;
/// Number of groups that share an input.
pub const GROUPS: usize = 4;
/// Linear layers of each group.
pub const SIZES: [usize; GROUPS] = [3, 1, 2, 1];
/// Parents of the tape node: x, four norms, and weight, A and B of each linear layer.
pub const PARENTS: usize = 5 + 3 * PROJECTIONS;
/// The input.
pub const X: usize = 0;
/// The norms: before attention, before the MLP, of query heads, of key heads.
pub const NORMS: [usize; 4] = [1, 2, 3, 4];

/// Place of a linear layer's weight; A and B follow.
pub fn weight(projection: usize) -> usize {
    5 + 3 * projection
}

/// The tensors on the card, weights in whole rows.
#[derive(Debug, Clone)]
pub struct Operands {
    tensors: Vec<Option<CubeTensor>>,
    /// Their addresses.
    at: Vec<Option<Matrix>>,
}

/// The linear layers in order.
pub fn projections(layer: &DecoderLayer) -> [&Projection; PROJECTIONS] {
    [&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down]
}

/// x and the parameters, as tensors of any rank.
enum Any {
    Row(Tensor<1>),
    Matrix(Tensor<2>),
}

impl Any {
    fn is_autodiff(&self) -> bool {
        match self {
            Any::Row(x) => x.is_autodiff(),
            Any::Matrix(x) => x.is_autodiff(),
        }
    }

    fn plain(self) -> CubeTensor {
        const ON_CARD: &str = "`takes` has seen the device";
        match self {
            Any::Row(x) => x.try_into_primitive::<Cube>().expect(ON_CARD),
            Any::Matrix(x) => x.try_into_primitive::<Cube>().expect(ON_CARD),
        }
    }

    fn on_tape(self) -> FloatTensor<Autodiff<Cube>> {
        const ON_CARD: &str = "`takes` has seen the device, and gradient checkpointing isn't used";
        match self {
            x if !x.is_autodiff() => Autodiff::<Cube>::from_inner(x.plain()),
            Any::Row(x) => x.try_into_primitive::<Autodiff<Cube>>().expect(ON_CARD),
            Any::Matrix(x) => x.try_into_primitive::<Autodiff<Cube>>().expect(ON_CARD),
        }
    }
}

fn all(x: Tensor<2>, layer: &DecoderLayer) -> Vec<Option<Any>> {
    let norms = [
        Some(layer.input_norm.clone()),
        Some(layer.post_norm.clone()),
        layer.q_norm.clone(),
        layer.k_norm.clone(),
    ];
    let mut all = vec![Some(Any::Matrix(x))];
    all.extend(norms.map(|norm| norm.map(Any::Row)));
    for projection in projections(layer) {
        let (a, b) = match projection.adapters.clone() {
            Some(adapters) => (Some(adapters.a), Some(adapters.b)),
            None => (None, None),
        };
        all.extend([Some(projection.weight.clone()), a, b].map(|x| x.map(Any::Matrix)));
    }
    all
}

/// Nodes of the parents on the tape, and which of them are tracked.
pub type Parents = ([NodeGuard; PARENTS], Vec<bool>);

/// The operands, with the nodes of their tape if any is on one.
pub fn take(x: Tensor<2>, layer: &DecoderLayer) -> (Operands, Option<Parents>) {
    let all = all(x, layer);
    if !all.iter().flatten().any(Any::is_autodiff) {
        return (Operands::new(all.into_iter().map(|x| x.map(Any::plain)).collect()), None);
    }
    let all: Vec<_> = all.into_iter().map(|x| x.map(Any::on_tape)).collect();
    let tracked = all.iter().map(|x| x.as_ref().is_some_and(|x| x.is_tracked())).collect();
    let like = all[X].as_ref().expect("x is there").primitive().clone();
    let (mut tensors, mut nodes) = (Vec::with_capacity(PARENTS), Vec::with_capacity(PARENTS));
    for tensor in all {
        match tensor {
            None => {
                tensors.push(None);
                // A parent that is not there: a node that nothing tracks.
                nodes.push(Autodiff::<Cube>::from_inner(like.clone()).node());
            }
            Some(tensor) => {
                let (tensor, node) = tensor.into_parts();
                tensors.push(Some(tensor));
                nodes.push(node);
            }
        }
    }
    let nodes = nodes.try_into().expect("as many nodes as parents");
    (Operands::new(tensors), Some((nodes, tracked)))
}

impl Operands {
    fn new(tensors: Vec<Option<CubeTensor>>) -> Self {
        let whole = |x: CubeTensor| if x.shape().num_dims() == 2 { rows(x) } else { x };
        let tensors: Vec<_> = tensors.into_iter().map(|x| x.map(whole)).collect();
        let at = tensors.iter().map(|x| x.as_ref().map(known_matrix)).collect();
        Self { tensors, at }
    }

    /// A tensor that is there.
    pub fn tensor(&self, place: usize) -> &CubeTensor {
        self.tensors[place].as_ref().expect("the tensor is there")
    }

    /// Where it lies.
    pub fn at(&self, place: usize) -> Matrix {
        self.at[place].expect("the tensor is there")
    }

    /// Where it lies, if it is there.
    pub fn maybe_at(&self, place: usize) -> Option<Matrix> {
        self.at[place]
    }

    /// A linear layer's weight.
    pub fn weight(&self, projection: usize) -> &CubeTensor {
        self.tensor(weight(projection))
    }

    /// Where it lies.
    pub fn weight_at(&self, projection: usize) -> Matrix {
        self.at(weight(projection))
    }

    /// Where a linear layer's A and B lie.
    pub fn adapter_at(&self, projection: usize) -> Option<[Matrix; 2]> {
        Some([self.at[weight(projection) + 1]?, self.at[weight(projection) + 2]?])
    }

    /// All A's and B's.
    pub fn adapters(&self) -> impl Iterator<Item = &CubeTensor> {
        (0..PROJECTIONS).flat_map(|j| &self.tensors[weight(j) + 1..weight(j) + 3]).flatten()
    }

    /// Whether some linear layer has adapters.
    pub fn adapted(&self) -> bool {
        (0..PROJECTIONS).any(|j| self.at[weight(j) + 1].is_some())
    }
}

/// The groups of a layer.
pub fn groups(layer: &DecoderLayer) -> [Group; GROUPS] {
    let projections = projections(layer);
    let mut first = 0;
    SIZES.map(|n| {
        let of_group = &projections[first..first + n];
        first += n;
        let outs: Vec<usize> = of_group.iter().map(|p| p.weight.dims()[0]).collect();
        let parts: Vec<Option<&[LoraPart]>> =
            of_group.iter().map(|p| p.adapters.as_ref().map(|a| a.parts.as_slice())).collect();
        Group::new(of_group[0].weight.dims()[1], &outs, &parts)
    })
}

/// Whether the layer op takes the parameters beside an input of `tokens` rows.
pub fn fits(layer: &DecoderLayer, tokens: usize) -> bool {
    let of_eight = |n: usize| n > 0 && n.is_multiple_of(8);
    let norms = [&layer.q_norm, &layer.k_norm];
    let widths = [layer.input_norm.dims()[0], layer.gate.weight.dims()[0]];
    let bf16 = |x: DType| x == DType::BF16;
    let dtypes = [&layer.input_norm, &layer.post_norm].into_iter().chain(norms.into_iter().flatten());
    let same_norms = layer.q_norm.is_some() == layer.k_norm.is_some();
    let whole = projections(layer).into_iter().all(|p| fits_projection(p, tokens));
    let adapted = projections(layer).iter().any(|p| p.adapters.is_some());
    // Adapters lie beside weights that are frozen, and that lie still.
    let frozen = !adapted || projections(layer).iter().all(|p| !p.weight.is_tracked());
    let sizes = matches!(layer.head_dim, 64 | 128) && widths.into_iter().all(of_eight) && widths[0] <= 32768;
    sizes && whole && frozen && same_norms && dtypes.map(|norm| norm.dtype()).all(bf16)
}

fn fits_projection(projection: &Projection, tokens: usize) -> bool {
    let parts = projection.adapters.iter().flat_map(|adapters| &adapters.parts);
    let sum: usize = parts.clone().map(|part| part.tokens).sum();
    let adapters = projection.adapters.as_ref().is_none_or(|adapters| {
        let f32 = [&adapters.a, &adapters.b].into_iter().all(|x| x.dtype() == DType::F32);
        f32 && sum == tokens && parts.clone().all(|part| part.dropout.is_none())
    });
    projection.bias.is_none() && projection.weight.dtype() == DType::BF16 && adapters
}
