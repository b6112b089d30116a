//! When one kind of question may be asked again.

/// A call longer than this slows its kind down: NVML holds the driver's global lock meanwhile.
const SLOW_NS: u64 = 1_000_000;
/// The slowest pace.
const SLOWEST_NS: u64 = 30_000_000_000;
/// So many quick rounds in a row make the pace twice as fast, up to the base pace.
const QUICK_ROUNDS: u32 = 3;
/// At least this long between two notes about one kind.
const NOTE_GAP_NS: u64 = 10_000_000_000;

/// The pace of one kind of question; pure, times are nanoseconds of one monotonic clock.
#[derive(Clone, Debug)]
pub struct Lane {
    what: &'static str,
    base_ns: u64,
    interval_ns: u64,
    next_ns: u64,
    last_ns: Option<u64>,
    quick_rounds: u32,
    announced_ns: u64,
    note_ns: Option<u64>,
    slowest_call_ns: u64,
}

impl Lane {
    /// A kind of question that is asked every `base_ns` and is due at once.
    pub fn new(what: &'static str, base_ns: u64) -> Self {
        Self {
            what,
            base_ns,
            interval_ns: base_ns,
            next_ns: 0,
            last_ns: None,
            quick_rounds: 0,
            announced_ns: base_ns,
            note_ns: None,
            slowest_call_ns: 0,
        }
    }

    /// Whether it is time to ask.
    pub fn due(&self, now_ns: u64) -> bool {
        now_ns >= self.next_ns
    }

    /// When it is due next.
    pub fn next_ns(&self) -> u64 {
        self.next_ns
    }

    /// Its answers are quick.
    pub fn is_quick(&self) -> bool {
        self.interval_ns == self.base_ns
    }

    /// From when an event may have it asked out of turn: a tenth of the pace after the last round,
    /// so that triggers slow down with the pace.
    pub fn trigger_ns(&self) -> u64 {
        self.last_ns.map_or(0, |last| last.saturating_add(self.interval_ns / 10)).min(self.next_ns)
    }

    /// Takes note of a round that ended now, the longest single call of which took `call_ns`.
    ///
    /// The first round does not count: it opens the device in the driver and says nothing of
    /// later ones.
    pub fn asked(&mut self, now_ns: u64, call_ns: u64) {
        let first = self.last_ns.replace(now_ns).is_none();
        if !first {
            self.adapt(call_ns);
        }
        self.next_ns = now_ns.saturating_add(self.interval_ns);
    }

    fn adapt(&mut self, call_ns: u64) {
        self.slowest_call_ns = self.slowest_call_ns.max(call_ns);
        if call_ns > SLOW_NS {
            self.quick_rounds = 0;
            self.interval_ns = self.interval_ns.saturating_mul(2).min(SLOWEST_NS);
            return;
        }
        self.quick_rounds += 1;
        if self.quick_rounds >= QUICK_ROUNDS {
            self.quick_rounds = 0;
            self.interval_ns = (self.interval_ns / 2).max(self.base_ns);
        }
    }

    /// What to tell people about the pace, if it is another than they were told; at most once in
    /// ten seconds.
    pub fn note(&mut self, now_ns: u64) -> Option<String> {
        let lately = self.note_ns.is_some_and(|then| now_ns < then.saturating_add(NOTE_GAP_NS));
        if lately || self.interval_ns == self.announced_ns {
            return None;
        }
        self.note_ns = Some(now_ns);
        self.announced_ns = self.interval_ns;
        let slowest_ms = std::mem::take(&mut self.slowest_call_ns) as f64 / 1e6;
        let pace_ms = self.interval_ns / 1_000_000;
        let Self { what, .. } = self;
        Some(if self.interval_ns == self.base_ns {
            format!("NVML answers quickly again: {what} every {pace_ms} ms as usual")
        } else {
            format!(
                "NVML took {slowest_ms:.1} ms for {what}, which holds the driver's lock: now every \
                 {pace_ms} ms in place of {} ms",
                self.base_ns / 1_000_000
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Asks whenever due until `end_ns`; gives the number of rounds.
    fn drive(lane: &mut Lane, now_ns: &mut u64, end_ns: u64, call_ns: u64) -> u32 {
        let mut rounds = 0;
        while lane.next_ns() < end_ns {
            *now_ns = lane.next_ns().max(*now_ns) + call_ns;
            lane.asked(*now_ns, call_ns);
            rounds += 1;
        }
        rounds
    }

    #[test]
    fn quick_answers_keep_the_pace() {
        let (mut lane, mut now) = (Lane::new("memory", 100 * MS), 0);
        let rounds = drive(&mut lane, &mut now, 10_000 * MS, MS / 10);
        assert!((99..=101).contains(&rounds), "{rounds}");
        assert_eq!(lane.note(now), None);
    }

    #[test]
    fn slow_answers_double_the_interval_up_to_thirty_seconds() {
        let mut lane = Lane::new("memory", 100 * MS);
        let mut intervals = Vec::new();
        for _ in 0..12 {
            let now = lane.next_ns();
            lane.asked(now, 2 * MS);
            intervals.push((lane.next_ns() - now) / MS);
        }
        let expected = [100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000, 30000];
        assert_eq!(intervals, expected, "the first round does not count");
    }

    #[test]
    fn quick_answers_bring_the_pace_back() {
        let (mut lane, mut now) = (Lane::new("memory", 100 * MS), 0);
        drive(&mut lane, &mut now, 60_000 * MS, 2 * MS);
        let slow = lane.interval_ns;
        drive(&mut lane, &mut now, 600_000 * MS, MS / 10);
        assert!(slow > 10_000 * MS);
        assert_eq!(lane.interval_ns, 100 * MS);
    }

    #[test]
    fn triggers_wait_for_a_tenth_of_the_pace() {
        let mut lane = Lane::new("processes", 1000 * MS);
        assert_eq!(lane.trigger_ns(), 0);
        lane.asked(5000 * MS, MS / 10);
        assert_eq!(lane.trigger_ns(), 5100 * MS);
        lane.asked(6000 * MS, 2 * MS);
        assert_eq!(lane.trigger_ns(), 6200 * MS);
    }

    #[test]
    fn notes_are_rare_and_end_with_the_truth() {
        let (mut lane, mut now, mut notes) = (Lane::new("memory", 100 * MS), 0, Vec::new());
        // Alternating: a slow round, then quick ones.
        for round in 0..2000_u64 {
            now = lane.next_ns();
            lane.asked(now, if round % 4 == 0 { 3 * MS } else { MS / 10 });
            notes.extend(lane.note(now));
        }
        let seconds = now / (1000 * MS);
        assert!(!notes.is_empty() && notes.len() as u64 <= seconds / 10 + 1, "{}", notes.len());
        assert!(notes[0].contains("3.0 ms for memory"), "{}", notes[0]);
        let end = now + 60_000 * MS;
        drive(&mut lane, &mut now, end, 2 * MS);
        now += NOTE_GAP_NS;
        let last = lane.note(now).unwrap();
        assert!(last.contains(&format!("every {} ms", lane.interval_ns / MS)), "{last}");
        assert_eq!(lane.note(now + NOTE_GAP_NS), None);
    }
}
