//! From the `device` key to a Burn device.
//!
//! `auto` takes CUDA where it is compiled in and a card is there, else a real GPU through wgpu, else the
//! CPU (`flex`). A software rasterizer is never taken by itself: flex is faster. Looking for
//! devices opens none of them.

use burn::tensor::{DType, Device};

use crate::config::{DeviceKind, DeviceSpec};
use crate::{Error, Result};

/// A device and what is to be said about it.
#[derive(Debug, Clone)]
pub struct Selected {
    /// The plain device (without autodiff).
    pub device: Device,
    /// `cuda:0`, `wgpu:0`, `vulkan:0` or `flex`.
    pub name: String,
    /// Set where the choice will disappoint, e.g. a software adapter.
    pub warning: Option<String>,
}

/// How many devices a run takes: those that are named; every card for `cuda`; else one.
pub fn count(spec: &DeviceSpec) -> usize {
    match (spec.kind, spec.indices.len()) {
        #[cfg(feature = "cuda")]
        (DeviceKind::Cuda, 0) => crate::ops::cuda::count().max(1),
        (_, named) => named.max(1),
    }
}

/// The kind of device that it comes to: `auto` is CUDA where a card can be used.
pub fn kind(spec: &DeviceSpec) -> DeviceKind {
    match spec.kind {
        #[cfg(feature = "cuda")]
        DeviceKind::Auto if crate::ops::cuda::count() > 0 => DeviceKind::Cuda,
        kind => kind,
    }
}

/// The device that `device` asks for; of several the first.
///
/// # Errors
/// A backend that isn't compiled in, a card that isn't there.
pub fn select(spec: &DeviceSpec) -> Result<Selected> {
    let index = spec.indices.first().copied();
    match spec.kind {
        DeviceKind::Auto => auto(index.unwrap_or(0)),
        DeviceKind::Cuda => cuda(index.unwrap_or(0)),
        DeviceKind::Wgpu => wgpu(index),
        DeviceKind::Vulkan => vulkan(index),
        DeviceKind::Flex => flex(),
    }
}

#[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
fn auto(card: usize) -> Result<Selected> {
    #[cfg(feature = "cuda")]
    if crate::ops::cuda::count() > 0 {
        return cuda(card);
    }
    #[cfg(feature = "wgpu")]
    if may_have_gpu()
        && let Some(device) = adapters::real(&adapters::of_wgpu()).into_iter().next()
    {
        return Ok(Selected { device, name: "wgpu:0".into(), warning: None });
    }
    flex()
}

/// Whether asking graphics drivers can find anything. Linux shows every GPU as a device file; where there is none,
/// loading drivers only costs time and lets some of them complain.
#[cfg(feature = "wgpu")]
fn may_have_gpu() -> bool {
    let files = ["/dev/dri", "/dev/nvidiactl", "/dev/dxg", "/dev/kgsl-3d0", "/dev/mali0"];
    !cfg!(target_os = "linux") || files.iter().any(|file| std::path::Path::new(file).exists())
}

fn flex() -> Result<Selected> {
    #[cfg(feature = "flex")]
    return Ok(Selected { device: Device::flex(), name: "flex".into(), warning: None });
    #[cfg(not(feature = "flex"))]
    return Err(not_compiled("flex"));
}

/// A card, opened: what it lacks is found before anything else is loaded.
#[cfg(feature = "cuda")]
fn cuda(index: usize) -> Result<Selected> {
    use crate::ops::cuda;
    let count = cuda::count();
    if index >= count {
        return Err(missing("cuda", index, count));
    }
    let name = format!("cuda:{index}");
    if let Err(cuda::Unusable { problem, hint }) = cuda::Gpu::open(index) {
        return Err(Error::device(format!("`{name}` can't be used: {problem}"), hint));
    }
    Ok(Selected { device: Device::cuda(index), name, warning: None })
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: usize) -> Result<Selected> {
    Err(not_compiled("cuda"))
}

#[cfg(feature = "wgpu")]
fn wgpu(index: Option<usize>) -> Result<Selected> {
    pick("wgpu", &adapters::of_wgpu(), index)
}

#[cfg(not(feature = "wgpu"))]
fn wgpu(_: Option<usize>) -> Result<Selected> {
    Err(not_compiled("wgpu"))
}

#[cfg(feature = "vulkan")]
fn vulkan(index: Option<usize>) -> Result<Selected> {
    pick("vulkan", &adapters::of_vulkan(), index)
}

#[cfg(not(feature = "vulkan"))]
fn vulkan(_: Option<usize>) -> Result<Selected> {
    Err(not_compiled("vulkan"))
}

/// The `index`-th real GPU; without an index and without a GPU, a software adapter with a warning.
#[cfg(feature = "wgpu")]
fn pick(name: &str, adapters: &[adapters::Adapter], index: Option<usize>) -> Result<Selected> {
    let mut real = adapters::real(adapters);
    let n = index.unwrap_or(0);
    if n < real.len() {
        let device = real.swap_remove(n);
        return Ok(Selected { device, name: format!("{name}:{n}"), warning: None });
    }
    let software = adapters.iter().find(|a| a.software);
    match software {
        Some(adapter) if index.is_none() => Ok(Selected {
            device: adapter.device.clone(),
            name: name.to_string(),
            warning: Some(format!(
                "`{name}` has no GPU here, only a software adapter: `device = \"flex\"` will be faster"
            )),
        }),
        _ => Err(missing(name, n, real.len())),
    }
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn missing(name: &str, index: usize, count: usize) -> Error {
    let hint = match count {
        0 => "set `device = \"auto\"` or `\"flex\"`, or look whether the driver is installed".to_string(),
        _ => format!("the indices are 0 to {}", count - 1),
    };
    Error::device(format!("there is no device `{name}:{index}`: {count} found"), hint)
}

#[cfg_attr(all(feature = "cuda", feature = "vulkan", feature = "flex"), expect(dead_code))]
fn not_compiled(name: &str) -> Error {
    Error::device(
        format!("this build has no `{name}` backend"),
        format!("build with `--features {name}`, or set `device = \"auto\"`"),
    )
}

/// Adapters as wgpu lists them.
#[cfg(feature = "wgpu")]
mod adapters {
    use burn::tensor::{Device, DeviceKind, DeviceType};

    /// One adapter.
    pub struct Adapter {
        pub device: Device,
        pub software: bool,
        /// Discrete before integrated before virtual.
        pub preference: usize,
    }

    pub fn of_wgpu() -> Vec<Adapter> {
        classify(Device::enumerate(DeviceType::Wgpu).into_vec(), Device::wgpu)
    }

    #[cfg(feature = "vulkan")]
    pub fn of_vulkan() -> Vec<Adapter> {
        classify(Device::enumerate(DeviceType::Vulkan).into_vec(), Device::vulkan)
    }

    /// Burn doesn't tell an adapter's kind, but compares devices: try each kind's name.
    fn classify(devices: Vec<Device>, named: fn(DeviceKind) -> Device) -> Vec<Adapter> {
        let n = devices.len();
        let is = |device: &Device, kind: fn(usize) -> DeviceKind| (0..n).any(|i| *device == named(kind(i)));
        devices
            .into_iter()
            .map(|device| {
                let kinds: [fn(usize) -> DeviceKind; 3] =
                    [DeviceKind::DiscreteGpu, DeviceKind::IntegratedGpu, DeviceKind::VirtualGpu];
                let preference = kinds.iter().position(|&k| is(&device, k)).unwrap_or(kinds.len());
                let software = device == named(DeviceKind::Cpu);
                Adapter { device, software, preference }
            })
            .collect()
    }

    pub fn real(adapters: &[Adapter]) -> Vec<Device> {
        let mut real: Vec<_> = adapters.iter().filter(|a| !a.software).collect();
        real.sort_by_key(|a| a.preference);
        real.into_iter().map(|a| a.device.clone()).collect()
    }
}

/// The CPU, to keep tensors off the device; the default device in a build without `flex`.
pub fn host() -> Device {
    #[cfg(feature = "flex")]
    return Device::flex();
    #[cfg(not(feature = "flex"))]
    return Device::default();
}

/// The device's own name, e.g. `NVIDIA H200`; `None` on the CPU. Opens the device.
pub fn hardware_name(device: &Device) -> Option<String> {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    return device.identity().map(|identity| identity.name);
    #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
    return {
        let _ = device;
        None
    };
}

/// Bytes that the process has reserved on the device, where it says.
pub fn device_bytes(device: &Device) -> Option<u64> {
    let burns = device.memory_pool_usage().map(|usage| usage.bytes_reserved);
    #[cfg(feature = "cuda")]
    return burns.map(|bytes| bytes + crate::ops::cuda::reserved_bytes(device));
    #[cfg(not(feature = "cuda"))]
    burns
}

/// Bytes that are free now on the card, or for this process where the device is the CPU; `None` where nobody says.
pub fn free_bytes(selected: &Selected) -> Option<u64> {
    #[cfg(feature = "cuda")]
    if let Some(free) = crate::ops::cuda::free_bytes(&selected.device) {
        return Some(free);
    }
    if selected.name != "flex" {
        return None;
    }
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let machine = kib * 1024;
    Some(limit_left().map_or(machine, |left| left.min(machine)))
}

/// What a container or job (a control group of Linux) leaves this process; `None` without a limit.
fn limit_left() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let mounted = std::path::Path::new("/sys/fs/cgroup");
    mounted.join(own).ancestors().take_while(|group| group.starts_with(mounted)).filter_map(group_left).min()
}

fn group_left(group: &std::path::Path) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(group.join(name)).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    // Pages of files that nobody has used for a while count as used, and give way.
    let files =
        read("memory.stat")?.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok());
    Some(limit.saturating_sub(used.saturating_sub(files.unwrap_or(0))))
}

/// The type that frozen weights have and layers compute in: `model.dtype`, where `auto` is bf16
/// on CUDA and f32 elsewhere.
///
/// # Errors
/// A type that the device can't compute in.
pub fn compute_dtype(selected: &Selected, text: &str) -> Result<DType> {
    let dtype = match text {
        "auto" if selected.name.starts_with("cuda") => DType::BF16,
        "auto" | "float32" | "f32" => DType::F32,
        "bfloat16" | "bf16" => DType::BF16,
        "float16" | "f16" => DType::F16,
        _ => {
            return Err(Error::device(
                format!("unknown `model.dtype = \"{text}\"`"),
                "it is one of `auto`, `float32`, `bfloat16`, `float16`",
            ));
        }
    };
    if !selected.device.supports_dtype(dtype) {
        return Err(Error::device(
            format!("`{}` can't compute in `model.dtype = \"{text}\"`", selected.name),
            "set `model.dtype = \"auto\"`",
        ));
    }
    Ok(dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(kind: DeviceKind, indices: &[usize]) -> DeviceSpec {
        DeviceSpec { kind, indices: indices.to_vec() }
    }

    #[test]
    fn devices_are_counted() {
        assert_eq!(count(&spec(DeviceKind::Flex, &[])), 1);
        assert_eq!(count(&spec(DeviceKind::Auto, &[])), 1);
        assert_eq!(count(&spec(DeviceKind::Wgpu, &[2, 3])), 2);
    }

    #[cfg(feature = "flex")]
    #[test]
    fn auto_finds_something_everywhere() {
        let selected = select(&spec(DeviceKind::Auto, &[])).unwrap();
        assert!(selected.warning.is_none());
        assert_eq!(select(&spec(DeviceKind::Flex, &[])).unwrap().name, "flex");
    }

    #[cfg(feature = "wgpu")]
    #[test]
    fn a_card_that_is_not_there_is_an_error_with_the_number_found() {
        let error = select(&spec(DeviceKind::Wgpu, &[99])).unwrap_err();
        assert!(error.to_string().contains("wgpu:99") && error.to_string().contains("found"), "{error}");
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_backend_that_is_not_compiled_in_names_the_feature() {
        let error = select(&spec(DeviceKind::Cuda, &[])).unwrap_err();
        assert!(error.hint().unwrap().contains("--features cuda"), "{error}");
    }

    #[cfg(feature = "flex")]
    #[test]
    fn dtype_follows_the_device() {
        let flex = select(&spec(DeviceKind::Flex, &[])).unwrap();
        assert_eq!(compute_dtype(&flex, "auto").unwrap(), DType::F32);
        assert!(compute_dtype(&flex, "int8").is_err());
    }
}
