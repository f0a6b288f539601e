//! Functions over slices that the compiler turns into vector instructions of this machine.
//!
//! The crate is built for any x86-64, so each function is compiled once more for AVX2 and for
//! AVX-512, and the version is chosen at run time. Sums run in [`LANES`] lanes in every version:
//! their order doesn't depend on the machine.

use std::mem::MaybeUninit;
use std::sync::OnceLock;

/// Partial sums kept side by side.
pub const LANES: usize = 32;

/// Vector instructions of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// AVX-512
    Avx512,
    /// AVX2 and FMA
    Avx2,
    /// What every machine has that this build is for.
    Baseline,
}

/// The widest vectors that this machine has.
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            match (avx2, avx512) {
                (true, true) => return Level::Avx512,
                (true, false) => return Level::Avx2,
                _ => {}
            }
        }
        Level::Baseline
    })
}

/// Defines a function that is compiled for each [`Level`] and chooses at run time.
///
/// The body may use the constant `FMA`: whether a fused multiply-add is one instruction.
macro_rules! vectorised {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::extra_unused_type_parameters, clippy::too_many_arguments)]
            fn body<const FMA: bool>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx512($($arg: $ty),*) $(-> $ret)? { body::<true>($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx2($($arg: $ty),*) $(-> $ret)? { body::<true>($($arg),*) }

                match $crate::ops::flex::simd::level() {
                    // SAFETY: `level` has found these features on this machine.
                    $crate::ops::flex::simd::Level::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::ops::flex::simd::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::ops::flex::simd::Level::Baseline => {}
                }
            }
            body::<{ cfg!(target_arch = "aarch64") }>($($arg),*)
        }
    };
}
pub(in crate::ops) use vectorised;

/// a · b + c, rounded once where the machine can.
#[inline(always)]
pub fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// eˣ with a relative error below 1.2e-7; 0 below −87.3, and e^88 above 88.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2, eʳ by its Taylor series (the first term left out is below
/// 6e-9), 2ⁿ by its bits.
#[inline(always)]
pub fn exp<const FMA: bool>(x: f32) -> f32 {
    const SMALLEST: f32 = -87.3;
    const LARGEST: f32 = 88.0;
    // Adding it leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, the first with zeros at its end, so that n · LN2_HIGH is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Comparisons rather than min and max: NaN stays NaN.
    let clamped = if x > LARGEST { LARGEST } else { x };
    let clamped = if clamped < SMALLEST { SMALLEST } else { clamped };
    let rounded = fma::<FMA>(clamped, std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = fma::<FMA>(n, -LN2_HIGH, clamped);
    let r = fma::<FMA>(n, -LN2_LOW, r);
    let mut series = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
        series = fma::<FMA>(series, r, coefficient);
    }
    let series = fma::<FMA>(series * r, r, r) + 1.0;
    let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(0x3f80_0000));
    if x < SMALLEST { 0.0 } else { series * power }
}

/// 1 / (1 + e⁻ˣ)
#[inline(always)]
pub fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FMA>(-x))
}

/// The sum of the lanes, halves onto halves.
#[inline(always)]
pub fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Σ term(i) for i below `len`, in lanes.
#[inline(always)]
pub fn sum_of(len: usize, term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = len / LANES * LANES;
    let mut start = 0;
    while start < whole {
        for (i, lane) in lanes.iter_mut().enumerate() {
            *lane += term(start + i);
        }
        start += LANES;
    }
    for i in whole..len {
        lanes[i - whole] += term(i);
    }
    sum_lanes(lanes)
}

/// The largest element, −∞ of none. NaN is passed over: it shows in the sum that follows.
#[inline(always)]
pub fn largest(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, value);
        }
    }
    chunks.remainder().iter().chain(&lanes).fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
}

/// value ← e^argument(value); returns the sum.
#[inline(always)]
pub fn exp_and_sum<const FMA: bool>(values: &mut [f32], argument: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let mut chunks = values.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *value = exp::<FMA>(argument(*value));
            *lane += *value;
        }
    }
    for (lane, value) in lanes.iter_mut().zip(chunks.into_remainder()) {
        *value = exp::<FMA>(argument(*value));
        *lane += *value;
    }
    sum_lanes(lanes)
}

vectorised! {
    /// Writes x · factor.
    pub fn scale_into(x: &[f32], factor: f32, out: &mut [MaybeUninit<f32>]) {
        for (slot, x) in out.iter_mut().zip(x) {
            slot.write(x * factor);
        }
    }
}

vectorised! {
    /// x ← x · factor
    pub fn scale(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }
}

vectorised! {
    /// x ← x + y
    pub fn add(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    vectorised! {
        fn exp_slice(x: &[f32], out: &mut [f32]) {
            for (out, &x) in out.iter_mut().zip(x) {
                *out = exp::<FMA>(x);
            }
        }
    }

    #[test]
    fn exp_is_within_its_stated_error() {
        let x: Vec<f32> = (0..4_000_000).map(|i| -87.2 + i as f32 * (175.2 / 4e6)).collect();
        let mut fast = vec![0.0; x.len()];
        exp_slice(&x, &mut fast);
        let worst = |values: &[f32]| {
            let errors = x.iter().zip(values).map(|(&x, &y)| {
                let exact = f64::from(x).exp();
                ((f64::from(y) - exact) / exact).abs()
            });
            errors.fold(0.0, f64::max)
        };
        assert!(worst(&fast) < 1.2e-7, "largest relative error {}", worst(&fast));
        // Without fused multiply-adds the reduction rounds once more.
        let plain: Vec<f32> = x.iter().map(|&x| exp::<false>(x)).collect();
        assert!(worst(&plain) < 1.8e-7, "largest relative error without FMA {}", worst(&plain));
    }

    #[test]
    fn exp_at_the_ends() {
        for (x, expected) in [(f32::NEG_INFINITY, 0.0), (-1000.0, 0.0), (0.0, 1.0), (-0.0, 1.0)] {
            assert_eq!(exp::<true>(x), expected, "exp({x})");
            assert_eq!(exp::<false>(x), expected, "exp({x})");
        }
        assert!(exp::<true>(f32::NAN).is_nan());
        assert!(exp::<true>(f32::INFINITY).is_finite());
        assert!(sigmoid::<true>(-200.0) >= 0.0 && sigmoid::<true>(-200.0) < 1e-37);
        assert_eq!(sigmoid::<true>(200.0), 1.0);
    }

    #[test]
    fn sums_take_every_term() {
        for len in [0, 1, 31, 32, 33, 100] {
            assert_eq!(sum_of(len, |i| i as f32), (len * len.saturating_sub(1) / 2) as f32);
        }
    }
}
