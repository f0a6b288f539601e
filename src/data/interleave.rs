//! Several sources → the order of one epoch, as `datasets.interleave_datasets` does it.

use std::ops::Range;

use rand_chacha::rand_core::Rng;

use super::order::generator;
use crate::config::StoppingStrategy;

/// Document numbers of one epoch. `sources` are the ranges of each source's documents.
///
/// Without probabilities the sources take turns; with them each next document's source is drawn.
/// `first_exhausted` ends with the first source that is used up; `all_exhausted` starts used-up sources
/// again until every one has been used up (documents then repeat).
pub(super) fn interleave(
    sources: &[Range<u32>],
    probabilities: Option<&[f64]>,
    strategy: StoppingStrategy,
    seed: u64,
) -> Result<Vec<u32>, String> {
    if let [only] = sources {
        return Ok(only.clone().collect());
    }
    if let Some(empty) = sources.iter().position(Range::is_empty) {
        return Err(format!("source {} of {} has no row that can be trained", empty + 1, sources.len()));
    }
    match probabilities {
        None => Ok(take_turns(sources, strategy)),
        Some(p) => draw(sources, p, strategy, seed),
    }
}

fn take_turns(sources: &[Range<u32>], strategy: StoppingStrategy) -> Vec<u32> {
    let lengths = sources.iter().map(|source| source.end - source.start);
    let rounds = match strategy {
        StoppingStrategy::FirstExhausted => lengths.min(),
        StoppingStrategy::AllExhausted => lengths.max(),
    };
    let round = |i: u32| sources.iter().map(move |s| s.start + i % (s.end - s.start));
    (0..rounds.unwrap_or(0)).flat_map(round).collect()
}

fn draw(
    sources: &[Range<u32>],
    probabilities: &[f64],
    strategy: StoppingStrategy,
    seed: u64,
) -> Result<Vec<u32>, String> {
    let total: f64 = probabilities.iter().sum();
    let bad = |p: &f64| !p.is_finite() || *p < 0.0;
    if probabilities.len() != sources.len() || probabilities.iter().any(bad) || total <= 0.0 {
        return Err(format!("`probabilities` {probabilities:?} don't fit {} sources", sources.len()));
    }
    // One that is never drawn would never be used up.
    let mut exhausted: Vec<bool> = probabilities.iter().map(|&p| p == 0.0).collect();
    let never = exhausted.clone();
    let mut next: Vec<u32> = sources.iter().map(|s| s.start).collect();
    let mut rng = generator(seed, u64::MAX);
    let mut listed = Vec::new();
    let ended = |exhausted: &[bool]| match strategy {
        StoppingStrategy::FirstExhausted => exhausted.iter().zip(&never).any(|(&e, &n)| e && !n),
        StoppingStrategy::AllExhausted => exhausted.iter().all(|&e| e),
    };
    while !ended(&exhausted) {
        // 53 random bits: uniform in [0, 1).
        let mut at = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * total;
        let mut drawn = never.iter().rposition(|&n| !n).unwrap_or(0);
        for (i, &p) in probabilities.iter().enumerate() {
            if at < p {
                drawn = i;
                break;
            }
            at -= p;
        }
        listed.push(next[drawn]);
        next[drawn] += 1;
        if next[drawn] == sources[drawn].end {
            exhausted[drawn] = true;
            next[drawn] = sources[drawn].start;
        }
    }
    Ok(listed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use StoppingStrategy::{AllExhausted, FirstExhausted};

    #[test]
    fn turns_are_taken() {
        // datasets.interleave_datasets of [0..2], [2..5] gives these.
        assert_eq!(interleave(&[0..2, 2..5], None, FirstExhausted, 0).unwrap(), [0, 2, 1, 3]);
        assert_eq!(interleave(&[0..2, 2..5], None, AllExhausted, 0).unwrap(), [0, 2, 1, 3, 0, 4]);
        let one = std::slice::from_ref(&(3..6));
        assert_eq!(interleave(one, None, FirstExhausted, 0).unwrap(), [3, 4, 5]);
    }

    #[test]
    fn sources_are_drawn_as_often_as_asked() {
        let sources = [0..1000, 1000..5000];
        let listed = interleave(&sources, Some(&[0.25, 0.75]), AllExhausted, 1).unwrap();
        let first = listed.iter().filter(|&&i| i < 1000).count() as f64 / listed.len() as f64;
        assert!((first - 0.25).abs() < 0.03, "{first}");
        for i in 0..5000 {
            assert!(listed.contains(&i), "{i} is missing");
        }
        assert_eq!(listed, interleave(&sources, Some(&[0.25, 0.75]), AllExhausted, 1).unwrap());
        assert_ne!(listed, interleave(&sources, Some(&[0.25, 0.75]), AllExhausted, 2).unwrap());

        let listed = interleave(&sources, Some(&[0.5, 0.5]), FirstExhausted, 1).unwrap();
        assert_eq!(*listed.last().unwrap(), 999, "ends with the first source used up");
        let never = interleave(&sources, Some(&[1.0, 0.0]), AllExhausted, 1).unwrap();
        assert_eq!(never, (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn what_cannot_be_drawn_is_refused() {
        assert!(interleave(&[0..1, 1..1], None, AllExhausted, 0).unwrap_err().contains("source 2 of 2"));
        for bad in [&[0.5][..], &[0.0, 0.0], &[-1.0, 2.0], &[f64::NAN, 1.0]] {
            assert!(interleave(&[0..1, 1..2], Some(bad), AllExhausted, 0).is_err(), "{bad:?}");
        }
    }
}
