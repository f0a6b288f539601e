//! Axes of a plot: the range that is shown, and its ticks.

use super::curves::limits;

/// What an axis shows, from one end to the other.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Axis {
    pub low: f64,
    pub high: f64,
    /// Round values within it, and how they are written.
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Steps: whole numbers from end to end.
    pub fn of_steps(low: f64, high: f64, ticks: usize) -> Self {
        let (low, high) = if low < high { (low, high) } else { (low - 1.0, high + 1.0) };
        let distance = round_step((high - low) / ticks as f64).max(1.0);
        Self { low, high, ticks: ticks_at(low.max(0.0), high, distance) }
    }

    /// Values with some room around them; from 0 with `from_zero`.
    pub fn of_values(low: f64, high: f64, ticks: usize, from_zero: bool) -> Self {
        let low = if from_zero { low.min(0.0) } else { low };
        let height = if high > low { high - low } else { magnitude(high) };
        let room = if from_zero { (0.0, 0.08) } else { (0.05, 0.05) };
        let (mut bottom, mut top) = (low - room.0 * height, high + room.1 * height);
        if high <= low {
            (bottom, top) =
                if from_zero { (low, low + height) } else { (low - height / 2.0, low + height / 2.0) };
        }
        Self {
            low: bottom,
            high: top,
            ticks: ticks_at(bottom, top, round_step((top - bottom) / ticks as f64)),
        }
    }

    /// How far from the low end a value is, as a part of the whole; what lies outside is moved to the end.
    pub fn part(&self, value: f64) -> f64 {
        ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }
}

fn magnitude(value: f64) -> f64 {
    if value == 0.0 { 1.0 } else { value.abs() }
}

/// The range of curves without their outliers: all that lies between the 1st and the 99th percentile.
pub(super) fn most_of(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let mut values: Vec<f64> = points.iter().map(|point| point.1).collect();
    values.sort_by(f64::total_cmp);
    let at = |part: f64| values.get((part * values.len().saturating_sub(1) as f64).round() as usize).copied();
    if values.len() < 20 { limits(points) } else { Some((at(0.01)?, at(0.99)?)) }
}

/// The range that holds both.
pub(super) fn wider(a: Option<(f64, f64)>, b: Option<(f64, f64)>) -> Option<(f64, f64)> {
    let (Some(a), Some(b)) = (a, b) else { return a.or(b) };
    Some((a.0.min(b.0), a.1.max(b.1)))
}

/// 1, 2 or 5 times a power of ten, at least `wanted`.
fn round_step(wanted: f64) -> f64 {
    let power = 10f64.powf(wanted.log10().floor());
    let digit = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * power >= wanted * (1.0 - 1e-9));
    digit.unwrap_or(10.0) * power
}

fn ticks_at(low: f64, high: f64, distance: f64) -> Vec<(f64, String)> {
    let (first, last) = ((low / distance - 1e-9).ceil() as i64, (high / distance + 1e-9).floor() as i64);
    (first..=last).map(|n| n as f64 * distance).map(|value| (value, written(value, distance))).collect()
}

/// `0.25`, `12,000` as `12k`, `5e-4`: with the digits that the distance between ticks needs.
fn written(value: f64, distance: f64) -> String {
    if value.abs() < distance / 1e6 {
        return "0".into();
    }
    let digits = |distance: f64| (-distance.log10().floor()).max(0.0) as usize;
    if distance < 1e-3 {
        let power = value.abs().log10().floor() as i32;
        let unit = 10f64.powi(power);
        let text = format!("{:.*}", digits(distance / unit), value / unit);
        let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
        // 9.99… of a power is the next one.
        return if text.starts_with("10") { format!("1e{}", power + 1) } else { format!("{text}e{power}") };
    }
    let (unit, letter) = match distance {
        d if d >= 1e6 => (1e6, "M"),
        d if d >= 1e3 => (1e3, "k"),
        _ => (1.0, ""),
    };
    format!("{:.*}{letter}", digits(distance / unit), value / unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|tick| tick.1.as_str()).collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(labels(&Axis::of_steps(1.0, 100.0, 5)), ["20", "40", "60", "80", "100"]);
        assert_eq!(labels(&Axis::of_steps(1.0, 4.0, 10)), ["1", "2", "3", "4"]);
        assert_eq!(labels(&Axis::of_values(0.0, 5e-4, 4, true)), ["0", "2e-4", "4e-4"]);
        assert_eq!(labels(&Axis::of_values(1.87, 7.55, 5, false)), ["2", "4", "6"]);
        assert_eq!(labels(&Axis::of_values(0.0, 112_345.0, 3, true)), ["0", "50k", "100k"]);
        assert_eq!(labels(&Axis::of_values(0.0, 1e-3, 4, true)), ["0", "5e-4", "1e-3"]);
    }

    #[test]
    fn one_value_has_an_axis_too() {
        for axis in [
            Axis::of_steps(1.0, 1.0, 8),
            Axis::of_values(0.0, 0.0, 4, true),
            Axis::of_values(2.5, 2.5, 4, false),
        ] {
            assert!(axis.low < axis.high && !axis.ticks.is_empty(), "{axis:?}");
            assert!(
                axis.ticks.iter().all(|tick| tick.0 >= axis.low - 1e-9 && tick.0 <= axis.high + 1e-9),
                "{axis:?}"
            );
        }
    }

    #[test]
    fn an_outlier_does_not_flatten_the_rest() {
        let mut points: Vec<_> = (0..200).map(|n| (f64::from(n), 2.0 + f64::from(n % 7) / 7.0)).collect();
        points[30].1 = 900.0;
        let (low, high) = most_of(&points).unwrap();
        assert!(low >= 2.0 && high < 3.0, "{low} {high}");
        assert_eq!(most_of(&[]), None);
    }
}
