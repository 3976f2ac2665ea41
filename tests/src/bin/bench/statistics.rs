//! Medians, and how far they can be trusted.

use serde_json::{Value, json};

/// A median with its 90 % bootstrap interval.
#[derive(Clone, Copy, Debug)]
pub struct Estimate {
    /// The median.
    pub median: f64,
    /// Lower end of the interval.
    pub lo: f64,
    /// Upper end of the interval.
    pub hi: f64,
}

impl Estimate {
    /// Of samples, at least one (percentile bootstrap of the median).
    pub fn of(samples: &[f64]) -> Self {
        const RESAMPLES: usize = 4000;
        // The same samples give the same interval: the seed is fixed.
        let mut random = 0x2545_f491_4f6c_dd1d_u64;
        let mut medians: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                let drawn = samples.iter().map(|_| {
                    // xorshift64.
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    samples[(random >> 32) as usize % samples.len()]
                });
                median(drawn.collect())
            })
            .collect();
        medians.sort_by(f64::total_cmp);
        Self {
            median: median(samples.to_vec()),
            lo: medians[RESAMPLES / 20],
            hi: medians[RESAMPLES - 1 - RESAMPLES / 20],
        }
    }

    /// As the bench's JSON has it.
    pub fn json(self) -> Value {
        let Self { median, lo, hi } = self;
        json!({"median": median, "lo": lo, "hi": hi})
    }
}

/// The median of at least one value.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        (values[middle - 1] + values[middle]) / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn an_interval_holds_the_median_and_narrows_with_more_samples() {
        let spread = |count: usize| -> Vec<f64> {
            (0..count).map(|n| 1.0 + (n % 11) as f64 / 100.0).collect()
        };
        let (few, many) = (Estimate::of(&spread(11)), Estimate::of(&spread(1100)));
        for estimate in [few, many] {
            assert!(estimate.lo <= estimate.median && estimate.median <= estimate.hi);
        }
        assert!(many.hi - many.lo < few.hi - few.lo);
    }
}
