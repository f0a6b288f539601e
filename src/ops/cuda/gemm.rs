//! Matrix products by cuBLASLt, sums in f32 (no TF32): descriptors and the chosen algorithm are
//! made once for each combination of shapes, strides, types and alignments.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;

use burn::tensor::DType;
use cudarc::cublaslt::sys::{
    self as lt, cublasLtMatmulDescAttributes_t as Desc, cublasLtMatmulPreferenceAttributes_t as Preference,
    cublasLtMatmulTile_t as Tile, cublasLtMatrixLayoutAttribute_t as Layout, cublasStatus_t as Status,
};

use super::driver::{Lane, Side, Unusable, WORKSPACE};

/// How many of cuBLASLt's choices are looked at.
const CHOICES: usize = 8;
/// Elements of an output from which on the tile matters.
const LARGE: usize = 1 << 22;
/// Summands from which on cuBLASLt's first choice is taken.
const LONG: usize = 1 << 14;
/// Calls from which on they run side by side; with fewer the streams' waits for each other cost more.
const SIDE_BY_SIDE: usize = 8;
/// Products of one shape from which on they are made in one call: a few are as fast one by one.
const MANY: usize = 4;
/// Tiles that were faster on an H200 than cuBLASLt's first choice, by up to 15 %, best first: they leave room for the
/// next tile's loads beside the stores of the last one's results (`tools/cuda/products.py`). The choice depends on
/// nothing but the shapes, so that a product's bits do.
const PREFERRED: [Tile; 3] = [
    Tile::CUBLASLT_MATMUL_TILE_128x160,
    Tile::CUBLASLT_MATMUL_TILE_176x128,
    Tile::CUBLASLT_MATMUL_TILE_168x128,
];

/// A row-major matrix on the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// Address of the first element.
    pub pointer: u64,
    /// Rows as they lie in memory.
    pub rows: usize,
    /// Columns as they lie in memory.
    pub columns: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// bf16 or f32.
    pub dtype: DType,
    /// Whether the product takes the transpose.
    pub transposed: bool,
}

impl Matrix {
    /// A matrix without gaps.
    pub fn dense(pointer: u64, rows: usize, columns: usize, dtype: DType) -> Self {
        Self { pointer, rows, columns, stride: columns, dtype, transposed: false }
    }

    /// The transpose, without moving anything.
    pub fn t(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// `n` rows from `first` on.
    pub fn rows(self, first: usize, n: usize) -> Self {
        let bytes = first * self.stride * self.dtype.size();
        Self { pointer: self.pointer + bytes as u64, rows: n, ..self }
    }

    /// `n` columns from `first` on.
    pub fn columns(self, first: usize, n: usize) -> Self {
        let bytes = first * self.dtype.size();
        Self { pointer: self.pointer + bytes as u64, columns: n, ..self }
    }

    /// Rows and columns as the product sees them.
    fn shape(&self) -> [usize; 2] {
        if self.transposed { [self.columns, self.rows] } else { [self.rows, self.columns] }
    }

    /// The largest power of two, up to 256, that divides the address.
    fn alignment(&self) -> u32 {
        1 << self.pointer.trailing_zeros().min(8)
    }
}

/// `out ← alpha · a · b`
#[derive(Debug, Clone, Copy)]
pub struct Product {
    /// Left factor.
    pub a: Matrix,
    /// Right factor.
    pub b: Matrix,
    /// Where the product goes.
    pub out: Matrix,
    /// A factor.
    pub alpha: f32,
}

impl Product {
    fn pointers(&self) -> [u64; 3] {
        [self.a, self.b, self.out].map(|x| x.pointer)
    }

    /// Multiplications, in thousands.
    fn size(&self) -> usize {
        let ([m, k], [_, n]) = (self.a.shape(), self.b.shape());
        m * n * k / 1000
    }

    /// How far its matrices lie behind those of a product that differs in nothing else; `None` where it does, or where they
    /// lie before.
    fn behind(&self, other: &Product) -> Option<[u64; 3]> {
        let without = |x: &Product| [x.a, x.b, x.out].map(|x| Matrix { pointer: 0, ..x });
        let same = without(self) == without(other) && self.alpha.to_bits() == other.alpha.to_bits();
        let [a, b, out] = [0, 1, 2].map(|n| self.pointers()[n].checked_sub(other.pointers()[n]));
        same.then_some([a?, b?, out?])
    }
}

/// Several products in one call: bytes from the matrices of one to those of the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Series {
    count: usize,
    /// Of a, b, what is added, and the output.
    steps: [u64; 4],
}

impl Series {
    const ONE: Series = Series { count: 1, steps: [0; 4] };
}

/// What decides about descriptors and algorithm: the matrices without their addresses.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    /// a, b, what is added, and the output.
    matrices: [Matrix; 4],
    alignments: [u32; 4],
    adds: bool,
    series: Series,
}

struct Plan {
    desc: lt::cublasLtMatmulDesc_t,
    /// In cuBLASLt's order: b, a, what is added, the output.
    layouts: [lt::cublasLtMatrixLayout_t; 4],
    algorithm: lt::cublasLtMatmulAlgo_t,
}

/// cuBLASLt's handle and the prepared products.
pub struct Products {
    handle: lt::cublasLtHandle_t,
    /// The card's, as in [`super::driver::Gpu`].
    capability: u32,
    plans: HashMap<Key, Plan>,
}

impl Products {
    /// Opens cuBLASLt on the current context.
    pub fn new(capability: u32) -> Result<Self, Unusable> {
        let mut handle = null_mut();
        // SAFETY: the library was found, and the call gets a place for its result.
        match unsafe { lt::cublasLtCreate(&mut handle) } {
            Status::CUBLAS_STATUS_SUCCESS => Ok(Self { handle, capability, plans: HashMap::new() }),
            status => Err(Unusable {
                problem: format!("cuBLASLt doesn't start: {status:?}"),
                hint: "install CUDA's runtime libraries in a version that the driver supports",
            }),
        }
    }

    fn plan(&mut self, [a, b, c, out]: [&Matrix; 4], adds: bool, series: Series) -> &Plan {
        let mut alignments = [a, b, c, out].map(Matrix::alignment);
        for (alignment, step) in alignments.iter_mut().zip(series.steps) {
            *alignment = 1 << (u64::from(*alignment) | step).trailing_zeros();
        }
        let matrices = [a, b, c, out].map(|m| Matrix { pointer: 0, ..*m });
        let (handle, capability) = (self.handle, self.capability);
        let key = Key { matrices, alignments, adds, series };
        self.plans.entry(key).or_insert_with(|| make_plan(handle, matrices, alignments, series, capability))
    }
}

impl Side<'_> {
    /// `out ← alpha · a · b + beta · out`
    pub fn product(&mut self, a: Matrix, b: Matrix, out: Matrix, alpha: f32, beta: f32) {
        self.multiply([a, b, out, out], alpha, beta, Series::ONE, self.gpu.main());
    }

    /// Products that don't depend on each other; many of one shape that lie evenly apart go in one call. Of many
    /// calls some run side by side, since one with low ranks and few rows doesn't fill the card.
    pub fn each_product(&mut self, mut all: Vec<Product>) {
        all.sort_by_key(|product| product.out.pointer);
        let mut calls = Vec::new();
        let mut rest = &all[..];
        while let [first, others @ ..] = rest {
            let step = others.first().and_then(|next| next.behind(first));
            let evenly =
                |pair: &&[Product]| pair[1].behind(&pair[0]).is_some_and(|found| Some(found) == step);
            let count = 1 + rest.windows(2).take_while(evenly).count();
            let series = match step {
                Some([a, b, out]) if count >= MANY => Series { count, steps: [a, b, out, out] },
                _ => Series::ONE,
            };
            calls.push((*first, series));
            rest = &rest[series.count..];
        }
        let main = self.gpu.main();
        if calls.len() < SIDE_BY_SIDE || super::trace::wanted() {
            calls.iter().for_each(|(product, series)| self.call(product, *series, main));
            return;
        }
        // The longest first, each where least is to do.
        calls.sort_by_key(|(product, series)| std::cmp::Reverse(product.size() * series.count));
        self.fork(calls.len(), |side, lanes| {
            let mut load = vec![0; lanes.len()];
            for (product, series) in calls {
                let lane = (0..lanes.len()).min_by_key(|&n| load[n]).unwrap_or(0);
                load[lane] += product.size() * series.count;
                side.call(&product, series, lanes[lane]);
            }
        });
    }

    fn call(&mut self, Product { a, b, out, alpha }: &Product, series: Series, lane: Lane) {
        self.multiply([*a, *b, *out, *out], *alpha, 0.0, series, lane);
    }

    /// `out ← a · b + c`, with c's shape and type that of `out`.
    pub fn product_onto(&mut self, a: Matrix, b: Matrix, c: Matrix, out: Matrix) {
        assert_eq!((c.shape(), c.dtype), (out.shape(), out.dtype), "product onto {c:?} into {out:?}");
        self.multiply([a, b, c, out], 1.0, 1.0, Series::ONE, self.gpu.main());
    }

    fn multiply(&mut self, [a, b, c, out]: [Matrix; 4], alpha: f32, beta: f32, series: Series, lane: Lane) {
        let ([m, k], [k2, n]) = (a.shape(), b.shape());
        assert_eq!((k, out.shape()), (k2, [m, n]), "product of {a:?} and {b:?} into {out:?}");
        if m == 0 || n == 0 {
            return;
        }
        let products = self.products();
        let handle = products.handle;
        let plan = products.plan([&a, &b, &c, &out], beta != 0.0, series);
        let pointer = |x: &Matrix| x.pointer as *mut c_void;
        // SAFETY: the plan was made for these shapes, strides, types and alignments; the matrices
        // lie in tensors that the caller holds; the workspace belongs to this stream alone.
        let status = unsafe {
            lt::cublasLtMatmul(
                handle,
                plan.desc,
                (&raw const alpha).cast(),
                pointer(&b),
                plan.layouts[0],
                pointer(&a),
                plan.layouts[1],
                (&raw const beta).cast(),
                pointer(&c),
                plan.layouts[2],
                pointer(&out),
                plan.layouts[3],
                &plan.algorithm,
                lane.workspace as *mut c_void,
                WORKSPACE,
                lane.stream.cast(),
            )
        };
        must(status, "product", &[a, b, out]);
        self.mark(|| match series.count {
            1 => Some(format!("product {m} × {n} × {k}")),
            count => Some(format!("{count} products {m} × {n} × {k}")),
        });
    }
}

/// cuBLASLt counts columns first, so it is told `outᵀ = bᵀ · aᵀ`: a row-major matrix is its own
/// transpose, column by column.
fn make_plan(
    handle: lt::cublasLtHandle_t,
    matrices: [Matrix; 4],
    alignments: [u32; 4],
    series: Series,
    capability: u32,
) -> Plan {
    let [a, b, c, out] = matrices;
    let order = [b, a, c, out];
    let mut desc = null_mut();
    // CUBLAS_OP_N is 0 and CUBLAS_OP_T is 1.
    let (on_b, on_a) = (i32::from(b.transposed), i32::from(a.transposed));
    // SAFETY: each call gets a place for its result or a value of the size that it is told.
    unsafe {
        let compute = lt::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        must(
            lt::cublasLtMatmulDescCreate(&mut desc, compute, lt::cudaDataType_t::CUDA_R_32F),
            "create",
            &order,
        );
        for (attribute, value) in
            [(Desc::CUBLASLT_MATMUL_DESC_TRANSA, on_b), (Desc::CUBLASLT_MATMUL_DESC_TRANSB, on_a)]
        {
            let size = size_of_val(&value);
            let status = lt::cublasLtMatmulDescSetAttribute(desc, attribute, (&raw const value).cast(), size);
            must(status, "transpose", &order);
        }
    }
    let [of_a, of_b, of_c, of_out] = series.steps;
    let mut steps = [of_b, of_a, of_c, of_out].into_iter();
    let layouts = order.map(|x| layout(&x, series.count, steps.next().expect("one for each matrix")));
    let alignments = [alignments[1], alignments[0], alignments[2], alignments[3]];
    let algorithm = algorithm(handle, desc, &layouts, alignments, &order, capability);
    Plan { desc, layouts, algorithm }
}

/// `step`: bytes to the same matrix of the next product.
fn layout(x: &Matrix, count: usize, step: u64) -> lt::cublasLtMatrixLayout_t {
    let dtype = match x.dtype {
        DType::BF16 => lt::cudaDataType_t::CUDA_R_16BF,
        DType::F32 => lt::cudaDataType_t::CUDA_R_32F,
        other => panic!("products take bf16 and f32, not {other:?}"),
    };
    let mut layout = null_mut();
    let (rows, columns, stride) = (x.columns as u64, x.rows as u64, x.stride as i64);
    // SAFETY: the call gets a place for its result.
    let status = unsafe { lt::cublasLtMatrixLayoutCreate(&mut layout, dtype, rows, columns, stride) };
    must(status, "layout", &[*x]);
    if count > 1 {
        let (count, step) = (count as i32, step as i64 / x.dtype.size() as i64);
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: the value has the size that is told.
            let status = unsafe { lt::cublasLtMatrixLayoutSetAttribute(layout, attribute, value, size) };
            must(status, "series", &[*x]);
        };
        set(Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const count).cast(), size_of_val(&count));
        set(
            Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
            (&raw const step).cast(),
            size_of_val(&step),
        );
    }
    layout
}

fn algorithm(
    handle: lt::cublasLtHandle_t,
    desc: lt::cublasLtMatmulDesc_t,
    layouts: &[lt::cublasLtMatrixLayout_t; 4],
    alignments: [u32; 4],
    matrices: &[Matrix; 4],
    capability: u32,
) -> lt::cublasLtMatmulAlgo_t {
    let mut preference = null_mut();
    let mut found = 0;
    let [a, b, c, out] = *layouts;
    // SAFETY: heuristic results are plain numbers, for which zeros are valid.
    let mut results: [lt::cublasLtMatmulHeuristicResult_t; CHOICES] = unsafe { std::mem::zeroed() };
    // SAFETY: each call gets a place for its result or a value of the size that it is told.
    unsafe {
        must(lt::cublasLtMatmulPreferenceCreate(&mut preference), "preference", matrices);
        let bytes = WORKSPACE;
        let attribute = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let status = lt::cublasLtMatmulPreferenceSetAttribute(
            preference,
            attribute,
            (&raw const bytes).cast(),
            size_of_val(&bytes),
        );
        must(status, "workspace", matrices);
        for (attribute, value) in [
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignments[0]),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignments[1]),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignments[2]),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignments[3]),
        ] {
            let value_pointer = (&raw const value).cast();
            let status = lt::cublasLtMatmulPreferenceSetAttribute(preference, attribute, value_pointer, 4);
            must(status, "alignment", matrices);
        }
        let status = lt::cublasLtMatmulAlgoGetHeuristic(
            handle,
            desc,
            a,
            b,
            c,
            out,
            preference,
            CHOICES as i32,
            results.as_mut_ptr(),
            &mut found,
        );
        must(status, "algorithm", matrices);
        must(lt::cublasLtMatmulPreferenceDestroy(preference), "preference", matrices);
    }
    assert!(found > 0, "cuBLASLt knows no way for the product of {matrices:?}");
    let choices = &results[..found as usize];
    let out = &matrices[3];
    let inner = matrices[1].shape()[1];
    let large = out.dtype == DType::BF16 && out.rows * out.columns >= LARGE && inner <= LONG;
    let preferred = PREFERRED.iter().filter(|_| large && capability == 90);
    preferred
        .flat_map(|&tile| choices.iter().find(|choice| config(&choice.algo, Config::Tile) == tile as u32))
        .find(|choice| config(&choice.algo, Config::Splits) <= 1)
        .unwrap_or(&choices[0])
        .algo
}

/// An algorithm's settings that are looked at.
#[derive(Debug, Clone, Copy)]
enum Config {
    Tile,
    Splits,
}

fn config(algo: &lt::cublasLtMatmulAlgo_t, which: Config) -> u32 {
    use lt::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let attribute = match which {
        Config::Tile => Attribute::CUBLASLT_ALGO_CONFIG_TILE_ID,
        Config::Splits => Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
    };
    let (mut value, mut written) = (0u32, 0);
    // SAFETY: both settings have 32 bits, and the call gets places for them and for the size.
    let status = unsafe {
        lt::cublasLtMatmulAlgoConfigGetAttribute(algo, attribute, (&raw mut value).cast(), 4, &mut written)
    };
    if status == Status::CUBLAS_STATUS_SUCCESS { value } else { 0 }
}

fn must(status: Status, what: &str, matrices: &[Matrix]) {
    assert!(status == Status::CUBLAS_STATUS_SUCCESS, "cuBLASLt, {what}: {status:?}, for {matrices:?}");
}
