//! Our CUDA kernels: compiled by NVRTC for the card at hand, kept on disk, loaded once.
//!
//! A module is a few of the `.cu` files beside this one, glued together, with sizes as `#define`s;
//! `tools/cuda/README.md` has each kernel's contract. On disk a compiled module is named after the
//! hash of all that went into it and carries a checksum, so that a damaged file is compiled again;
//! it is written beside and moved into place, so that several starts at once don't disturb each other.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_void};
use std::path::Path;
use std::ptr::null_mut;

use cudarc::driver::sys as cu;
use cudarc::nvrtc::sys as nvrtc;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use super::driver::{Side, must};
use crate::folders;

/// The files of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Files {
    /// Attention with `mma.sync`.
    Attention,
    /// Attention with Hopper's instructions.
    AttentionHopper,
    /// Root-mean-square norm.
    Norm,
    /// Head norms and rotary embedding.
    Rope,
    /// Attention of a text's next token.
    NextToken,
    /// SwiGLU.
    Swiglu,
    /// Cross-entropy.
    CrossEntropy,
    /// Trained rows out of and back into all rows.
    Rows,
    /// AdamW and sums of squares.
    Optimizer,
    /// The same files for gradients in bf16.
    HalfGradients,
    /// Sums of partial results.
    Small,
    /// Adapters into their places beside stacked weights.
    Adapters,
    /// The embedding's gradient.
    Embedding,
}

/// A module: files and what they are compiled with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Module {
    /// The files.
    pub files: Files,
    /// The size that the files are compiled for (width, head size, bits of a moment); 0 where they take none.
    pub size: usize,
    /// f32 activations instead of bf16.
    pub float32: bool,
    /// f32 norm weights beside bf16 activations.
    pub weight_float32: bool,
}

impl Module {
    /// These files for bf16 and this size.
    pub fn bf16(files: Files, size: usize) -> Self {
        Self { files, size, float32: false, weight_float32: false }
    }

    /// These files for f32 where `float32` says so, and this size.
    pub fn of(files: Files, size: usize, float32: bool) -> Self {
        Self { float32, ..Self::bf16(files, size) }
    }

    fn source(&self) -> String {
        let common = include_str!("common.cu");
        let elements = include_str!("elements.cu");
        let work = include_str!("attention_work.cu");
        let parts: &[&str] = match self.files {
            Files::Attention => &[common, work, include_str!("attention.cu")],
            Files::AttentionHopper => {
                &[common, include_str!("hopper.cu"), work, include_str!("attention_sm90.cu")]
            }
            Files::Norm => &[common, elements, include_str!("norm.cu")],
            Files::Rope => &[common, elements, include_str!("qk_norm_rope.cu")],
            Files::NextToken => &[common, elements, include_str!("next_token.cu")],
            Files::Swiglu => &[common, elements, include_str!("swiglu.cu")],
            Files::CrossEntropy => &[common, elements, include_str!("cross_entropy.cu")],
            Files::Rows => &[common, elements, include_str!("rows.cu")],
            Files::Optimizer | Files::HalfGradients => &[common, elements, include_str!("optimizer.cu")],
            Files::Small => &[common, elements, include_str!("small.cu")],
            Files::Adapters => &[common, elements, include_str!("adapters.cu")],
            Files::Embedding => &[common, elements, include_str!("embedding.cu")],
        };
        parts.join("\n")
    }

    fn defines(&self, shared_memory: usize) -> Vec<String> {
        let size = self.size;
        let mut defines = match self.files {
            Files::Attention => {
                let stages = attention_stages(shared_memory);
                vec![format!("HEAD_DIM={size}"), format!("STAGES={stages}")]
            }
            Files::AttentionHopper | Files::Rope | Files::NextToken => vec![format!("HEAD_DIM={size}")],
            Files::Norm => vec![format!("DIM={size}")],
            Files::Swiglu => vec![format!("FEATURES={size}")],
            Files::CrossEntropy => vec![format!("CE_THREADS={CE_THREADS}")],
            Files::Optimizer if size == 16 => vec!["MOMENTS_BF16".into()],
            Files::HalfGradients => vec!["GRADIENT_BF16".into()],
            Files::Rows | Files::Optimizer | Files::Small | Files::Adapters | Files::Embedding => Vec::new(),
        };
        if self.float32 {
            defines.push("FLOAT32".into());
        }
        if self.weight_float32 {
            defines.push("WEIGHT_FLOAT32".into());
        }
        defines
    }
}

/// Stages of attention's backward without Hopper's instructions: two take 129 KiB at a head size of 128.
pub fn attention_stages(shared_memory: usize) -> usize {
    if shared_memory >= 160 << 10 { 2 } else { 1 }
}

/// Threads of the cross-entropy's blocks.
pub const CE_THREADS: usize = 1024;

/// A kernel's argument.
#[derive(Debug, Clone)]
pub enum Arg {
    /// An address; 0 for null.
    Pointer(u64),
    /// 32 bits.
    Int(i32),
    /// 32 bits.
    Float(f32),
    /// A tensor map, by value.
    Map(cu::CUtensorMap),
    /// A structure of eight floats, by value.
    Floats([f32; 8]),
    /// A structure of whole 8 bytes, by value.
    Words(Vec<u64>),
}

impl Arg {
    fn address(&self) -> *mut c_void {
        match self {
            Arg::Pointer(x) => (&raw const *x).cast_mut().cast(),
            Arg::Int(x) => (&raw const *x).cast_mut().cast(),
            Arg::Float(x) => (&raw const *x).cast_mut().cast(),
            Arg::Map(x) => (&raw const *x).cast_mut().cast(),
            Arg::Floats(x) => (&raw const *x).cast_mut().cast(),
            Arg::Words(x) => x.as_ptr().cast_mut().cast(),
        }
    }
}

impl From<u64> for Arg {
    fn from(pointer: u64) -> Self {
        Arg::Pointer(pointer)
    }
}

impl From<usize> for Arg {
    fn from(x: usize) -> Self {
        Arg::Int(i32::try_from(x).expect("sizes and strides on the card fit 31 bits"))
    }
}

impl From<f32> for Arg {
    fn from(x: f32) -> Self {
        Arg::Float(x)
    }
}

impl From<cu::CUtensorMap> for Arg {
    fn from(x: cu::CUtensorMap) -> Self {
        Arg::Map(x)
    }
}

/// How a kernel is spread: blocks, threads of a block, dynamic shared bytes.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// Number of blocks.
    pub blocks: usize,
    /// Threads of a block.
    pub threads: usize,
    /// Dynamic shared memory of a block.
    pub shared: usize,
}

impl Grid {
    /// Without dynamic shared memory.
    pub fn new(blocks: usize, threads: usize) -> Self {
        Self { blocks, threads, shared: 0 }
    }
}

/// The loaded modules and their functions.
#[derive(Default)]
pub struct Kernels {
    modules: HashMap<Module, cu::CUmodule>,
    /// With the dynamic shared memory that was allowed.
    functions: HashMap<(Module, &'static str), (cu::CUfunction, usize)>,
}

// SAFETY: modules and functions of the driver may be used from any thread; they are used under the
// card's lock.
unsafe impl Send for Kernels {}

impl Side<'_> {
    /// Launches a kernel, whose contract the arguments keep.
    pub fn launch(&mut self, module: Module, name: &'static str, grid: Grid, arguments: &[Arg]) {
        if grid.blocks == 0 {
            return;
        }
        let function = self.function(module, name, grid.shared);
        let mut addresses: Vec<*mut c_void> = arguments.iter().map(Arg::address).collect();
        let (blocks, threads, shared) = (grid.blocks as u32, grid.threads as u32, grid.shared as u32);
        // SAFETY: each address is that of a value which outlives the call; the caller keeps the
        // kernel's contract.
        let result = unsafe {
            cu::cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared,
                self.gpu.stream(),
                addresses.as_mut_ptr(),
                null_mut(),
            )
        };
        must(result, name);
        self.mark(|| Some(name.into()));
    }

    fn function(&mut self, module: Module, name: &'static str, shared: usize) -> cu::CUfunction {
        if let Some((function, allowed)) = self.kernels().functions.get(&(module, name))
            && *allowed >= shared
        {
            return *function;
        }
        let loaded = self.module(module);
        let mut function = null_mut();
        let text = CString::new(name).expect("a kernel's name has no zero byte");
        let maximum = cu::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a loaded module, a name that ends with 0, a place for the result.
        unsafe {
            must(cu::cuModuleGetFunction(&mut function, loaded, text.as_ptr()), name);
            if shared > 48 << 10 {
                must(cu::cuFuncSetAttribute(function, maximum, shared as i32), name);
            }
        }
        self.kernels().functions.insert((module, name), (function, shared.max(48 << 10)));
        function
    }

    fn module(&mut self, module: Module) -> cu::CUmodule {
        if let Some(loaded) = self.kernels().modules.get(&module) {
            return *loaded;
        }
        let capability = self.gpu.capability;
        // The `a` allows the instructions of this generation alone.
        let arch = format!("sm_{capability}{}", if capability >= 90 { "a" } else { "" });
        let cubin = cubin(&module.source(), &arch, &module.defines(self.gpu.shared_memory));
        let mut loaded = null_mut();
        // SAFETY: a cubin that NVRTC has made, as its checksum tells, and a place for the result.
        must(unsafe { cu::cuModuleLoadData(&mut loaded, cubin.as_ptr().cast()) }, "loading a module");
        self.kernels().modules.insert(module, loaded);
        loaded
    }
}

/// The compiled module, from the cache or made now.
fn cubin(source: &str, arch: &str, defines: &[String]) -> Vec<u8> {
    let mut flags: Vec<String> = vec![format!("--gpu-architecture={arch}"), "--std=c++17".into()];
    flags.extend(defines.iter().map(|define| format!("-D{define}")));
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the call gets two places for its results.
    unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) };
    let what = format!("{source}\n{}\n{major}.{minor}", flags.join(" "));
    let name = format!("{:032x}.cubin", xxh3_128(what.as_bytes()));
    let path = folders::cache().join("kernels").join(name);
    if let Some(cubin) = read(&path) {
        return cubin;
    }
    let cubin = compile(source, &flags);
    if let Err(error) = write(&path, &cubin) {
        tracing::warn!("compiled kernels can't be kept in {}: {error}", path.display());
    }
    cubin
}

/// The cubin, if its checksum is right.
fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(path).ok()?;
    let (sum, cubin) = bytes.split_first_chunk::<8>()?;
    (u64::from_le_bytes(*sum) == xxh3_64(cubin)).then(|| cubin.to_vec())
}

fn write(path: &Path, cubin: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mut bytes = xxh3_64(cubin).to_le_bytes().to_vec();
    bytes.extend_from_slice(cubin);
    let beside = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&beside, bytes)?;
    std::fs::rename(&beside, path)
}

fn compile(source: &str, flags: &[String]) -> Vec<u8> {
    let text = |x: &str| CString::new(x).expect("sources and flags have no zero byte");
    let (source, name) = (text(source), text("kernels.cu"));
    let flags: Vec<CString> = flags.iter().map(|flag| text(flag)).collect();
    let pointers: Vec<*const c_char> = flags.iter().map(|flag| flag.as_ptr()).collect();
    let mut program = null_mut();
    let mut size = 0;
    // SAFETY: texts that end with 0 and outlive the calls; buffers of the sizes that NVRTC names.
    unsafe {
        let (headers, names) = (std::ptr::null(), std::ptr::null());
        let created =
            nvrtc::nvrtcCreateProgram(&mut program, source.as_ptr(), name.as_ptr(), 0, headers, names);
        compiled(created, "");
        let result = nvrtc::nvrtcCompileProgram(program, pointers.len() as i32, pointers.as_ptr());
        compiled(result, &log(program));
        compiled(nvrtc::nvrtcGetCUBINSize(program, &mut size), "");
        let mut cubin = vec![0u8; size];
        compiled(nvrtc::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast()), "");
        nvrtc::nvrtcDestroyProgram(&mut program);
        cubin
    }
}

/// What the compiler has to say.
fn log(program: nvrtc::nvrtcProgram) -> String {
    let mut size = 0;
    // SAFETY: a live program; the buffer has the size that NVRTC names.
    unsafe {
        nvrtc::nvrtcGetProgramLogSize(program, &mut size);
        let mut text = vec![0u8; size];
        nvrtc::nvrtcGetProgramLog(program, text.as_mut_ptr().cast());
        String::from_utf8_lossy(&text).into_owned()
    }
}

fn compiled(result: nvrtc::nvrtcResult, log: &str) {
    assert!(result == nvrtc::nvrtcResult::NVRTC_SUCCESS, "NVRTC: {result:?}\n{log}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_cubin_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernels/x.cubin");
        write(&path, b"not really a cubin").unwrap();
        assert_eq!(read(&path).unwrap(), b"not really a cubin");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[12] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(read(&path), None);
        std::fs::write(&path, &bytes[..5]).unwrap();
        assert_eq!(read(&path), None);
    }
}
