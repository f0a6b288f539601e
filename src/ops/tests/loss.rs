//! `linear_cross_entropy` and `token_losses`.

use burn::tensor::{Int, Tensor};

use super::super::{chunked, linear_cross_entropy, plain, token_losses};
use super::*;

/// Logits up to 20 carry 1e-6 each into the softmax; sums of up to 3000 weights and 600 rows.
const TOLERANCE: f32 = 1e-5;

#[derive(Clone)]
struct Case {
    tokens: usize,
    width: usize,
    vocabulary: usize,
    rows: Vec<i64>,
}

type Loss = fn(Tensor<2>, Tensor<2>, Tensor<1, Int>, Tensor<1, Int>) -> Tensor<1>;

impl Case {
    fn new(tokens: usize, width: usize, vocabulary: usize, rows: impl IntoIterator<Item = i64>) -> Self {
        Self { tokens, width, vocabulary, rows: rows.into_iter().collect() }
    }

    /// Hidden and weight; logits of a few units.
    fn inputs(&self) -> [Input; 2] {
        let mut hidden = random(self.tokens * self.width, 1);
        hidden.values.iter_mut().for_each(|x| *x *= 3.0);
        [hidden, random(self.vocabulary * self.width, 2)]
    }

    fn op(&self, op: Loss) -> impl Fn(&[Tensor<1>]) -> Tensor<1> + Sync + use<> {
        let Case { tokens, width, vocabulary, rows } = self.clone();
        let targets: Vec<i64> = rows.iter().map(|row| (row * 7919 + 3) % vocabulary as i64).collect();
        move |x| {
            let ints = |values: &[i64]| {
                let data = TensorData::new(values.to_vec(), [values.len()]);
                Tensor::<1, Int>::from_data(data, &x[0].device())
            };
            let (hidden, weight) =
                (x[0].clone().reshape([tokens, width]), x[1].clone().reshape([vocabulary, width]));
            op(hidden, weight, ints(&rows), ints(&targets))
        }
    }
}

fn cases() -> Vec<Case> {
    vec![
        Case::new(1, 16, 5, [0]),
        Case::new(9, 16, 1, [2, 8]),
        Case::new(40, 32, 300, [0, 3, 4, 39]),
        Case::new(700, 24, 1000, (0..700).filter(|row| row % 6 != 1)),
        Case::new(20, 64, 3000, [19, 5, 5, 0]),
    ]
}

#[test]
fn linear_cross_entropy_is_the_plain_one() {
    for case in cases() {
        let [hidden, weight] = case.inputs();
        for inputs in [
            [hidden.clone(), weight.clone()],
            [hidden.clone(), weight.clone().frozen()],
            [hidden.clone().frozen(), weight.clone()],
            [hidden.clone().frozen(), weight.clone().frozen()],
        ] {
            let name =
                format!("linear_cross_entropy, {} rows, vocabulary {}", case.rows.len(), case.vocabulary);
            let plain = case.op(plain::linear_cross_entropy);
            compare(&name, &inputs, TOLERANCE, &case.op(linear_cross_entropy), &plain);
            compare(
                &format!("chunked {name}"),
                &inputs,
                TOLERANCE,
                &case.op(chunked::linear_cross_entropy),
                &plain,
            );
        }
    }
}

#[test]
fn gradient_is_the_slope() {
    let case = Case::new(6, 8, 11, [1, 2, 5]);
    assert_slopes("linear_cross_entropy", &case.inputs(), 5e-3, &case.op(linear_cross_entropy));
}

#[test]
fn repeats_bit_for_bit() {
    let case = Case::new(600, 32, 900, 20..580);
    assert_same_bits("linear_cross_entropy", &case.inputs(), &case.op(linear_cross_entropy));
}

#[test]
fn token_losses_are_the_terms_of_the_sum() {
    for case in cases() {
        let frozen = case.inputs().map(Input::frozen);
        let losses = run(&frozen, &case.op(token_losses));
        assert_close("token_losses", &losses, &run(&frozen, &case.op(plain::token_losses)), TOLERANCE);
        let sum: f64 = losses[0].iter().map(|&loss| f64::from(loss)).sum();
        let total = f64::from(run(&frozen, &case.op(linear_cross_entropy))[0][0]);
        assert!((sum - total).abs() <= 1e-6 * total.abs().max(1.0), "{sum} and {total}");
    }
}

/// Nothing to train on: a loss of zero and gradients of zero, rather than a panic.
#[test]
fn no_rows() {
    let case = Case::new(5, 8, 10, []);
    for result in run(&case.inputs(), &case.op(linear_cross_entropy)) {
        assert!(!result.is_empty() && result.iter().all(|&x| x == 0.0));
    }
}

/// Large logits neither overflow nor lose the loss of the largest.
#[test]
fn large_logits() {
    let case = Case::new(3, 16, 50, 0..3);
    let mut inputs = case.inputs();
    inputs[0].values.iter_mut().for_each(|x| *x *= 100.0);
    // Logits near 1000 are rounded to 6e-5, and so are differences of them.
    compare(
        "large logits",
        &inputs,
        1e-4,
        &case.op(linear_cross_entropy),
        &case.op(plain::linear_cross_entropy),
    );
}
