//! The model and its adapters against transformers and PEFT on wgpu.
//!
//! The adapter is `EMBERTUNE_WGPU`: `cpu` (a software driver; the default), `discrete`,
//! `integrated`, `virtual` or `default`. Each test runs in a process of its own, so that a driver
//! that crashes fails one test by name. Without an adapter the tests are skipped, unless
//! `EMBERTUNE_REQUIRE_WGPU=1`.
#![cfg(feature = "wgpu")]

mod common;

use std::process::Command;

use burn::tensor::wgpu::WgpuInitError;
use burn::tensor::{Device, DeviceKind};
use common::goldens::Case;

/// Ten times what f32 on a CPU is held to: WGSL's `exp`, `log` and `inverseSqrt` may be off by a
/// few units in the last place, products are summed in another order, and a compiler may contract
/// or reassociate them; the CPU tolerances are three to ten times f32's own rounding.
const FACTOR: f64 = 10.0;

/// Set in the process that does the work.
const CHILD: &str = "EMBERTUNE_WGPU_CHILD";
/// That process's exit code where there is no adapter.
const NO_ADAPTER: i32 = 77;

#[test]
fn model_values_are_those_of_transformers() {
    in_own_process("model_values_are_those_of_transformers", || check("model"));
}

#[test]
fn packed_documents_are_as_if_alone() {
    in_own_process("packed_documents_are_as_if_alone", || check("packed"));
}

#[test]
fn adapter_values_and_gradients_are_those_of_peft() {
    in_own_process("adapter_values_and_gradients_are_those_of_peft", || check("lora"));
}

fn check(kind: &str) {
    let device = adapter();
    for case in Case::all(kind) {
        eprintln!("{} on {:?}", case.name, device);
        case.check_values(&device, FACTOR);
    }
}

fn adapter() -> Device {
    let name = std::env::var("EMBERTUNE_WGPU").unwrap_or_else(|_| "cpu".into());
    let kind = match name.as_str() {
        "cpu" => DeviceKind::Cpu,
        "discrete" => DeviceKind::DiscreteGpu(0),
        "integrated" => DeviceKind::IntegratedGpu(0),
        "virtual" => DeviceKind::VirtualGpu(0),
        "default" => DeviceKind::DefaultDevice,
        other => panic!("EMBERTUNE_WGPU is `{other}`, wanted cpu, discrete, integrated, virtual or default"),
    };
    match Device::wgpu_options().device_kind(kind).init() {
        Ok(device) => device,
        Err(WgpuInitError::AdapterUnavailable { message, .. }) => {
            eprintln!("no `{name}` adapter: {message}");
            std::process::exit(NO_ADAPTER)
        }
        Err(error) => panic!("{error}"),
    }
}

/// Runs the test `name` of this program again as a process of its own, there with `work`.
fn in_own_process(name: &str, work: impl Fn()) {
    if std::env::var_os(CHILD).is_some() {
        return work();
    }
    let runtime_dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name, "--nocapture", "--test-threads", "1"]).env(CHILD, "1");
    if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        child.env("XDG_RUNTIME_DIR", runtime_dir.path()); // Mesa's drivers want one
    }
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(NO_ADAPTER) {
        let reason = text.lines().find(|line| line.starts_with("no `")).unwrap_or("no adapter");
        let required = std::env::var("EMBERTUNE_REQUIRE_WGPU").is_ok_and(|value| value == "1");
        assert!(!required, "EMBERTUNE_REQUIRE_WGPU=1, but {reason}");
        eprintln!("skipped: {reason} (`apt install mesa-vulkan-drivers` brings one)");
        return;
    }
    assert!(output.status.success(), "{name} in its own process: {}\n{text}", output.status);
    assert!(text.contains("1 passed"), "{name} did not run in its own process:\n{text}");
}
