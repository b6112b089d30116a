//! A bounded time series of a value that changes in steps: lowest and highest value a bucket.

/// Buckets that are kept unless asked otherwise; at one more, neighbours are merged and buckets become twice as wide.
const MAX_BUCKETS: usize = 512;

/// Width of the first buckets, nanoseconds.
const FIRST_WIDTH_NS: i64 = 1_000_000_000;

/// Lowest and highest value of a stretch of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Lowest value, the one carried in from before included.
    pub min: i64,
    /// Highest value.
    pub max: i64,
}

/// The series. Memory does not grow with time.
#[derive(Clone, Debug)]
pub struct Series {
    origin_ns: Option<i64>,
    width_ns: i64,
    buckets: Vec<Bucket>,
    max_buckets: usize,
    last: i64,
}

impl Default for Series {
    fn default() -> Self {
        Self::bounded(MAX_BUCKETS)
    }
}

impl Series {
    /// A series of at most `max_buckets` buckets, at least two: fewer where there are many series.
    pub fn bounded(max_buckets: usize) -> Self {
        let max_buckets = max_buckets.max(2);
        Self {
            origin_ns: None,
            width_ns: FIRST_WIDTH_NS,
            buckets: Vec::new(),
            max_buckets,
            last: 0,
        }
    }

    /// The value became `value` at `ts_ns`. A time before the last one counts for the last bucket.
    pub fn push(&mut self, ts_ns: i64, value: i64) {
        let origin_ns = *self.origin_ns.get_or_insert(ts_ns);
        let since_ns = ts_ns.saturating_sub(origin_ns).max(0);
        while since_ns / self.width_ns >= self.max_buckets as i64 {
            self.merge();
        }
        let index = (since_ns / self.width_ns) as usize;
        if self.buckets.is_empty() {
            self.buckets.push(Bucket { min: value, max: value });
        }
        if index >= self.buckets.len() {
            self.buckets.resize(index + 1, Bucket { min: self.last, max: self.last });
        }
        if let Some(bucket) = self.buckets.last_mut() {
            bucket.min = bucket.min.min(value);
            bucket.max = bucket.max.max(value);
        }
        self.last = value;
    }

    /// Start of the first bucket, nanoseconds since the epoch; `None` while empty.
    pub fn origin_ns(&self) -> Option<i64> {
        self.origin_ns
    }

    /// Width of a bucket, nanoseconds.
    pub fn width_ns(&self) -> i64 {
        self.width_ns
    }

    /// The buckets, oldest first, without gaps. The last one is not complete.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    fn merge(&mut self) {
        self.buckets = self
            .buckets
            .chunks(2)
            .map(|pair| Bucket {
                min: pair.iter().map(|bucket| bucket.min).min().unwrap_or(0),
                max: pair.iter().map(|bucket| bucket.max).max().unwrap_or(0),
            })
            .collect();
        self.width_ns = self.width_ns.saturating_mul(2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: i64 = FIRST_WIDTH_NS;

    #[test]
    fn a_bucket_keeps_its_extremes_and_what_was_carried_in() {
        let mut series = Series::default();
        series.push(100, 10);
        series.push(100 + S, 50);
        series.push(101 + S, 20);
        let expected = [Bucket { min: 10, max: 10 }, Bucket { min: 10, max: 50 }];
        assert_eq!(series.buckets(), expected);
        series.push(100 + 4 * S, 7);
        assert_eq!(series.buckets()[2], Bucket { min: 20, max: 20 }, "quiet time is no gap");
        assert_eq!(series.buckets().len(), 5);
    }

    #[test]
    fn buckets_merge_and_extremes_survive() {
        let mut series = Series::default();
        for second in 0..2_000_i64 {
            series.push(second * S, if second == 777 { -5 } else { second });
        }
        assert!(series.buckets().len() <= MAX_BUCKETS);
        assert_eq!(series.width_ns(), 4 * S);
        assert_eq!(series.buckets()[777 / 4].min, -5);
        assert_eq!(series.buckets().last().unwrap().max, 1_999);
    }

    #[test]
    fn absurd_times_do_no_harm() {
        let mut series = Series::default();
        series.push(0, 1);
        series.push(i64::MAX, 2);
        series.push(i64::MIN, 3);
        assert!(series.buckets().len() <= MAX_BUCKETS);
        assert_eq!(series.buckets().last().unwrap().max, 3);
    }
}
