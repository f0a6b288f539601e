//! What the ops cost at Qwen3-0.6B's shapes: time on the card, and the host's share.

use std::time::Instant;

use burn::tensor::{DType, Device, Distribution, Tensor};
use embertune::ops::{self, Documents, LoraPart};

use super::{card, ints, rope};

const T: usize = 32768;

#[test]
#[ignore = "prints times"]
fn timings() {
    let Some(device) = card() else { return };
    let make = |rows: usize, columns: usize| {
        Tensor::<2>::random([rows, columns], Distribution::Normal(0.0, 0.02), (&device, DType::F32))
            .cast(DType::BF16)
    };
    let tracked = |x: Tensor<2>| x.autodiff().require_grad();
    let weight = |n: usize| make(1, n).reshape([n]);
    let (x, w) = (tracked(make(T, 1024)), make(3072, 1024));
    time("linear 1024→3072", &device, || sum(ops::linear(x.clone(), w.clone())));
    let lora = |inner: usize, out: usize| {
        let x = tracked(make(T, inner));
        let (w, a, b) = (
            make(out, inner),
            tracked(make(16, inner).cast(DType::F32)),
            tracked(make(out, 16).cast(DType::F32)),
        );
        let parts = [LoraPart { tokens: T, rank: 16, scale: 2.0, dropout: None }];
        time(&format!("lora {inner}→{out}"), &device, || {
            sum(ops::lora_linear(x.clone(), w.clone(), a.clone(), b.clone(), &parts))
        });
    };
    lora(1024, 3072);
    lora(1024, 2048);
    lora(1024, 1024);
    lora(3072, 1024);
    time("rms_norm 1024", &device, || sum(ops::rms_norm(x.clone(), weight(1024), 1e-6)));
    let tables = rope(T, 128, &device);
    let q = tracked(make(T, 2048));
    time("qk_norm_rope 16×128", &device, || {
        sum(ops::qk_norm_rope(q.clone().reshape([T, 16, 128]), Some(weight(128)), 1e-6, &tables)
            .reshape([T, 2048]))
    });
    let (gate, up) = (tracked(make(T, 3072)), tracked(make(T, 3072)));
    time("swiglu 3072", &device, || sum(ops::swiglu(gate.clone(), up.clone())));
    time("add 1024", &device, || sum(x.clone() + x.clone()));
    let (k, v) = (tracked(make(T, 1024)), tracked(make(T, 1024)));
    let documents = Documents { cu_seqlens: (0..=8).map(|n| n * 4096).collect() };
    time("attention 16/8×128", &device, || {
        let heads = |x: &Tensor<2>, n: usize| x.clone().reshape([T, n, 128]);
        sum(ops::attention(heads(&q, 16), heads(&k, 8), heads(&v, 8), &documents, 0.088).reshape([T, 2048]))
    });
    let head = make(151936, 1024);
    let all: Vec<i32> = (0..T as i32).collect();
    time("linear_cross_entropy", &device, || {
        ops::linear_cross_entropy(x.clone(), head.clone(), ints(&all, &device), ints(&all, &device))
    });
}

/// Something small to go backward from, whose own gradient is one cheap op.
fn sum(x: Tensor<2>) -> Tensor<1> {
    x.sum()
}

/// Forward, and forward with backward; the last of three rounds of ten.
fn time(name: &str, device: &Device, op: impl Fn() -> Tensor<1>) {
    let mut line = String::new();
    for backward in [false, true] {
        let (mut host, mut all) = (0.0, 0.0);
        for _ in 0..3 {
            device.sync().unwrap();
            let start = Instant::now();
            for _ in 0..10 {
                let out = op();
                if backward {
                    drop(out.backward());
                }
            }
            host = start.elapsed().as_secs_f64() * 100.0;
            device.sync().unwrap();
            all = start.elapsed().as_secs_f64() * 100.0;
        }
        line +=
            &format!(" {}: {all:.3} ms (host {host:.3})", if backward { "with backward" } else { "forward" });
    }
    eprintln!("{name:24}{line}");
}
