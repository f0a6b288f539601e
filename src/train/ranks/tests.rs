use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};

use super::*;
use crate::report::Quiet;

fn run<T: Send>(ranks: usize, work: impl Fn(&Ranks) -> Result<T> + Sync) -> Result<T> {
    let mut config = SftConfig { max_steps: Some(1), ..SftConfig::default() };
    config.log.file = false;
    config.scheduler = crate::config::SchedulerConfig::Constant;
    let plan = Plan::new(&config, 1)?;
    World::Threads(ranks).run(&config, &plan, &mut Quiet, &|ranks, _, _| work(&ranks))
}

#[test]
fn sums_are_those_of_all_ranks_and_the_same_on_each() {
    let sums = std::sync::Mutex::new(Vec::new());
    run(3, |ranks| {
        let device = Device::flex();
        let n = ranks.rank() as f32;
        let parts = vec![
            Tensor::<1>::from_floats([n, 1e8 * n, 0.1], &device),
            Tensor::<1>::from_floats([n + 1.0], &device),
        ];
        let parts = ranks.sum(parts)?;
        let counts = ranks.sum_f64([1.0, n.into()])?;
        assert_eq!(counts, [3.0, 3.0]);
        assert!(ranks.any(ranks.rank() == 2)? && !ranks.any(false)?);
        assert_eq!(ranks.from_first(|| Ok(format!("of {}", ranks.rank())))?, "of 0");
        let values: Vec<Vec<f32>> = parts.into_iter().map(|p| p.into_data().try_to_vec().unwrap()).collect();
        sums.lock().unwrap().push(values);
        Ok(())
    })
    .unwrap();
    let sums = sums.into_inner().unwrap();
    assert_eq!(sums[0], [vec![3.0, 3e8, 0.1 + 0.1 + 0.1], vec![6.0]]);
    assert!(sums.iter().all(|sum| *sum == sums[0]) && sums.len() == 3);
}

#[test]
fn each_rank_holds_the_state_of_its_part_and_all_have_all_parameters() {
    use crate::config::OptimConfig;
    use crate::model::Trainable;
    use crate::train::optim::Optimizer;

    let lengths = [5, 4, 3, 2, 1];
    let trainable = lengths.map(|n| Trainable {
        name: format!("p{n}.weight"),
        id: burn::module::ParamId::new(),
        shape: vec![n],
    });
    type Named = (String, Vec<f32>);
    let work = |ranks: &Ranks| -> Result<(Vec<Vec<f32>>, Vec<Named>, usize)> {
        let device = Device::flex();
        let mut optimizer = Optimizer::new(&OptimConfig::default(), &trainable).sharded(ranks);
        let filled = |value: f32| lengths.map(|n| Tensor::<1>::full([n], value, &device)).to_vec();
        let mut values = filled(1.0);
        for _ in 0..3 {
            let updated = optimizer.update(values, filled(0.5), 1e-2, 1.0, None);
            values = optimizer.spread(updated, ranks)?;
        }
        let floats = |t: Tensor<1>| t.into_data().try_to_vec::<f32>().unwrap();
        let state = optimizer.state(ranks, &device)?;
        let foreign =
            lengths.iter().filter(|n| optimizer.leaves_out(&format!("p{n}.weight.exp_avg"))).count();
        let state = state.into_iter().map(|t| (t.name, floats(t.values))).collect();
        Ok((values.into_iter().map(floats).collect(), state, foreign))
    };
    let (values, state, foreign) = work(&Ranks::alone()).unwrap();
    assert_eq!((state.len(), foreign), (10, 0));
    for ranks in [2, 3] {
        let shared = run(ranks, |ranks| {
            let got = work(ranks)?;
            assert_eq!(got.0, values, "every rank has every parameter");
            assert!((2..=4).contains(&got.2), "{} of 5 are other ranks'", got.2);
            Ok(got)
        });
        assert_eq!(shared.unwrap().1, state, "the first rank has all of the state to save");
    }
}

#[test]
fn parts_are_shared_out_evenly() {
    let ranks = |ranks| Ranks { rank: 0, ranks, link: None };
    assert_eq!(ranks(1).owners(&[3, 1]), [0, 0]);
    assert_eq!(ranks(2).owners(&[1, 9, 4, 4]), [1, 0, 1, 1]);
    assert_eq!(ranks(3).owners(&[2, 2, 2]), [0, 1, 2]);
}

#[test]
fn a_rank_that_fails_brings_the_others_down() {
    let ended = AtomicUsize::new(0);
    for panics in [false, true] {
        let start = Instant::now();
        let error = run(3, |ranks| {
            let result = (|| {
                ranks.wait()?;
                if ranks.rank() == 1 {
                    assert!(!panics, "a broken invariant");
                    return Err(Error::train("out of luck", "try again"));
                }
                // Waits for a rank that won't come.
                ranks.sum_f64([1.0]).map(drop)
            })();
            ended.fetch_add(1, Ordering::SeqCst);
            result
        })
        .unwrap_err();
        let message = if panics { "rank 1: panicked: a broken invariant" } else { "rank 1: out of luck" };
        assert!(error.to_string().contains(message), "{error}");
        assert!(start.elapsed() < Duration::from_secs(10));
    }
    assert_eq!(ended.into_inner(), 2 + 3, "all three came to an end both times, one by its panic");
}

#[test]
fn an_error_of_rank_0_alone_is_told_as_its_own() {
    let error = run(2, |ranks| ranks.from_first::<u8>(|| Err(Error::train("no", "yes")))).unwrap_err();
    assert_eq!((error.to_string().as_str(), error.hint().as_deref()), ("no", Some("yes")));
}

#[test]
fn what_differs_between_ranks_is_named() {
    let error = run(2, |ranks| ranks.agree("the data", &ranks.rank().to_string(), "copy it")).unwrap_err();
    assert!(error.to_string().contains("the data of rank 1 is not that of rank 0"), "{error}");
}
