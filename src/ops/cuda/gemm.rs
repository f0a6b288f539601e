//! Matrix products by cuBLASLt, sums in f32 (no TF32): descriptors and the chosen algorithm are
//! made once for each combination of shapes, strides, types and alignments.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;

use burn::tensor::DType;
use cudarc::cublaslt::sys::{
    self as lt, cublasLtMatmulDescAttributes_t as Desc, cublasLtMatmulPreferenceAttributes_t as Preference,
    cublasStatus_t as Status,
};

use super::driver::{Side, Unusable, WORKSPACE};

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

/// What decides about descriptors and algorithm: the matrices without their addresses.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    /// a, b, what is added, and the output.
    matrices: [Matrix; 4],
    alignments: [u32; 4],
    adds: bool,
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
    plans: HashMap<Key, Plan>,
}

impl Products {
    /// Opens cuBLASLt on the current context.
    pub fn new() -> Result<Self, Unusable> {
        let mut handle = null_mut();
        // SAFETY: the library was found, and the call gets a place for its result.
        match unsafe { lt::cublasLtCreate(&mut handle) } {
            Status::CUBLAS_STATUS_SUCCESS => Ok(Self { handle, plans: HashMap::new() }),
            status => Err(Unusable {
                problem: format!("cuBLASLt doesn't start: {status:?}"),
                hint: "install CUDA's runtime libraries in a version that the driver supports",
            }),
        }
    }

    fn plan(&mut self, [a, b, c, out]: [&Matrix; 4], adds: bool) -> &Plan {
        let alignments = [a, b, c, out].map(Matrix::alignment);
        let matrices = [a, b, c, out].map(|m| Matrix { pointer: 0, ..*m });
        let handle = self.handle;
        let key = Key { matrices, alignments, adds };
        self.plans.entry(key).or_insert_with(|| make_plan(handle, matrices, alignments))
    }
}

impl Side<'_> {
    /// `out ← alpha · a · b + beta · out`
    pub fn product(&mut self, a: Matrix, b: Matrix, out: Matrix, alpha: f32, beta: f32) {
        self.multiply([a, b, out, out], alpha, beta);
    }

    /// `out ← a · b + c`, with c's shape and type that of `out`.
    pub fn product_onto(&mut self, a: Matrix, b: Matrix, c: Matrix, out: Matrix) {
        assert_eq!((c.shape(), c.dtype), (out.shape(), out.dtype), "product onto {c:?} into {out:?}");
        self.multiply([a, b, c, out], 1.0, 1.0);
    }

    fn multiply(&mut self, [a, b, c, out]: [Matrix; 4], alpha: f32, beta: f32) {
        let ([m, k], [k2, n]) = (a.shape(), b.shape());
        assert_eq!((k, out.shape()), (k2, [m, n]), "product of {a:?} and {b:?} into {out:?}");
        if m == 0 || n == 0 {
            return;
        }
        let (workspace, stream) = (self.gpu.workspace(), self.gpu.stream());
        let products = self.products();
        let handle = products.handle;
        let plan = products.plan([&a, &b, &c, &out], beta != 0.0);
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
                workspace as *mut c_void,
                WORKSPACE,
                stream.cast(),
            )
        };
        must(status, "product", &[a, b, out]);
        self.mark(|| Some(format!("product {m} × {n} × {k}")));
    }
}

/// cuBLASLt counts columns first, so it is told `outᵀ = bᵀ · aᵀ`: a row-major matrix is its own
/// transpose, column by column.
fn make_plan(handle: lt::cublasLtHandle_t, matrices: [Matrix; 4], alignments: [u32; 4]) -> Plan {
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
    let layouts = order.map(|x| layout(&x));
    let alignments = [alignments[1], alignments[0], alignments[2], alignments[3]];
    let algorithm = algorithm(handle, desc, &layouts, alignments, &order);
    Plan { desc, layouts, algorithm }
}

fn layout(x: &Matrix) -> lt::cublasLtMatrixLayout_t {
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
    layout
}

fn algorithm(
    handle: lt::cublasLtHandle_t,
    desc: lt::cublasLtMatmulDesc_t,
    layouts: &[lt::cublasLtMatrixLayout_t; 4],
    alignments: [u32; 4],
    matrices: &[Matrix],
) -> lt::cublasLtMatmulAlgo_t {
    let mut preference = null_mut();
    let mut found = 0;
    let [a, b, c, out] = *layouts;
    // SAFETY: a heuristic result is plain numbers, for which zeros are valid.
    let mut result: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
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
            1,
            &mut result,
            &mut found,
        );
        must(status, "algorithm", matrices);
        must(lt::cublasLtMatmulPreferenceDestroy(preference), "preference", matrices);
    }
    assert!(found == 1, "cuBLASLt knows no way for the product of {matrices:?}");
    result.algo
}

fn must(status: Status, what: &str, matrices: &[Matrix]) {
    assert!(status == Status::CUBLAS_STATUS_SUCCESS, "cuBLASLt, {what}: {status:?}, for {matrices:?}");
}
