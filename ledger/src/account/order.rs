//! A bounded reorder buffer: inputs come in as the kernel hands them out (a call's record is made
//! when it returns) and leave in the order in which they took effect.

use std::collections::{BTreeMap, HashMap};

use crate::call::{Action, Call, Input, ProcId};

/// When an input takes effect, nanoseconds since the epoch.
///
/// What takes away (free, unmap, release) does so at its entry, what gives does so at its return:
/// the driver may hand a freed address to another thread long before the freeing call returns, and
/// never hands out an address before its allocating call entered. Contexts change at the return of
/// their calls, the destroying ones included, since those take long and would always come late; a
/// context handle that was handed out meanwhile is told apart by its own time.
pub fn effect_ns(input: &Input) -> i64 {
    match input {
        Input::Call(call) => call_effect_ns(call),
        Input::Exit { ts_ns, .. } | Input::Exec { ts_ns, .. } => *ts_ns,
    }
}

/// [`effect_ns`] of a call.
pub(super) fn call_effect_ns(call: &Call) -> i64 {
    match call.action {
        Action::Free { .. }
        | Action::TensorFree { .. }
        | Action::VmmRelease { .. }
        | Action::VmmUnmap { .. }
        | Action::Unreserve { .. }
        | Action::HostUnregister { .. }
        | Action::ArrayDestroy { .. }
        | Action::ExternalDestroy { .. }
        | Action::BlockClose { .. } => call.enter_ns,
        _ => call.exit_ns,
    }
}

/// Place of a buffered input: effect time, then arrival.
type Key = (i64, u64);

/// What is buffered of one process.
#[derive(Clone, Copy, Debug)]
struct Held {
    inputs: usize,
    latest_ns: i64,
}

/// The reorder buffer.
#[derive(Debug)]
pub struct Order {
    buffer: BTreeMap<Key, Input>,
    held: HashMap<ProcId, Held>,
    capacity: usize,
    arrivals: u64,
    /// Latest effect time that has left.
    drained_ns: i64,
    late: u64,
    forced: u64,
}

impl Order {
    /// A buffer that holds `capacity` inputs; above that the oldest leave early.
    pub fn new(capacity: usize) -> Self {
        Self {
            buffer: BTreeMap::new(),
            held: HashMap::new(),
            capacity,
            arrivals: 0,
            drained_ns: i64::MIN,
            late: 0,
            forced: 0,
        }
    }

    /// Takes an input in. One that took effect before something that has left already is counted
    /// as late and leaves with the next drain: the account copes with it.
    ///
    /// The end of a process waits for all that is buffered of the process, whatever the time stamps
    /// say. An exec does not: what is buffered may be the new program's, and no call of the old one
    /// returns after it.
    pub fn push(&mut self, input: Input) {
        let proc_id = proc_of(&input);
        let mut ns = effect_ns(&input);
        self.late += u64::from(ns < self.drained_ns);
        let held = self.held.entry(proc_id).or_insert(Held { inputs: 0, latest_ns: i64::MIN });
        if matches!(input, Input::Exit { .. }) {
            ns = ns.max(held.latest_ns);
        }
        held.inputs += 1;
        held.latest_ns = held.latest_ns.max(ns);
        self.buffer.insert((ns, self.arrivals), input);
        self.arrivals += 1;
    }

    /// Everything that took effect up to `ns`, and whatever is above the capacity, in order of
    /// effect; ties in order of arrival. What the caller leaves in the iterator stays buffered.
    pub fn drain_until(&mut self, ns: i64) -> impl Iterator<Item = Input> + '_ {
        std::iter::from_fn(move || {
            let (&key, _) = self.buffer.first_key_value()?;
            let forced = self.buffer.len() > self.capacity;
            if key.0 > ns && !forced {
                return None;
            }
            self.forced += u64::from(key.0 > ns);
            self.take(key)
        })
    }

    /// Everything that is left, in order of effect.
    pub fn drain_all(&mut self) -> impl Iterator<Item = Input> + '_ {
        self.drain_until(i64::MAX)
    }

    /// Inputs that came after something with a later effect had left.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// Inputs that left before their time because the buffer was full.
    pub fn forced(&self) -> u64 {
        self.forced
    }

    /// Inputs held now.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Nothing is held.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    fn take(&mut self, key: Key) -> Option<Input> {
        let input = self.buffer.remove(&key)?;
        self.drained_ns = self.drained_ns.max(key.0);
        let proc_id = proc_of(&input);
        if let Some(held) = self.held.get_mut(&proc_id) {
            held.inputs -= 1;
            if held.inputs == 0 {
                self.held.remove(&proc_id);
            }
        }
        Some(input)
    }
}

fn proc_of(input: &Input) -> ProcId {
    match input {
        Input::Call(call) => call.proc_id,
        Input::Exit { proc_id, .. } | Input::Exec { proc_id, .. } => *proc_id,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::account::tests::helpers::{alloc, at, exec, exit, free};

    fn times(inputs: impl Iterator<Item = Input>) -> Vec<i64> {
        inputs.map(|input| effect_ns(&input)).collect()
    }

    #[test]
    fn frees_leave_by_entry_and_allocations_by_return() {
        let mut order = Order::new(16);
        order.push(at(alloc(0x10, 1), 1, 30));
        order.push(at(free(0x20), 20, 90));
        order.push(at(free(0x30), 10, 95));
        assert_eq!(times(order.drain_until(25)), [10, 20]);
        assert_eq!(times(order.drain_all()), [30]);
        assert_eq!(order.late(), 0);
    }

    #[test]
    fn equal_times_keep_their_arrival() {
        let mut order = Order::new(16);
        for addr in [3, 1, 2] {
            order.push(at(free(addr), 5, 6));
        }
        let addrs: Vec<u64> = order
            .drain_all()
            .map(|input| match input {
                Input::Call(Call { action: Action::Free { addr, .. }, .. }) => addr,
                _ => 0,
            })
            .collect();
        assert_eq!(addrs, [3, 1, 2]);
    }

    #[test]
    fn late_inputs_are_counted_and_still_delivered() {
        let mut order = Order::new(16);
        order.push(at(free(1), 50, 51));
        assert_eq!(times(order.drain_until(60)), [50]);
        order.push(at(free(1), 55, 70));
        order.push(at(free(1), 45, 70));
        assert_eq!(order.late(), 1, "nothing later than 55 had left");
        assert_eq!(times(order.drain_until(60)), [45, 55]);
    }

    #[test]
    fn an_exit_never_overtakes_its_own_process() {
        let mut order = Order::new(16);
        order.push(at(alloc(1, 1), 10, 40));
        order.push(exit(30));
        let last = order.drain_all().last();
        assert!(matches!(last, Some(Input::Exit { ts_ns: 30, .. })));
    }

    #[test]
    fn an_exec_comes_before_the_calls_of_the_new_program() {
        let mut order = Order::new(16);
        order.push(at(alloc(1, 1), 10, 20));
        order.push(at(alloc(2, 1), 40, 50));
        order.push(exec(30));
        assert_eq!(times(order.drain_all()), [20, 30, 50]);
    }

    #[test]
    fn above_the_capacity_the_oldest_leave_early() {
        let mut order = Order::new(2);
        for ns in [3, 2, 1] {
            order.push(at(free(1), ns, 9));
        }
        assert_eq!(times(order.drain_until(0)), [1]);
        assert_eq!((order.forced(), order.len()), (1, 2));
        assert!(order.held.len() == 1 && order.drain_all().count() == 2);
        assert!(order.held.is_empty() && order.is_empty());
    }

    #[test]
    fn a_partly_used_drain_keeps_the_rest() {
        let mut order = Order::new(16);
        order.push(at(free(1), 1, 2));
        order.push(at(free(2), 2, 3));
        assert!(order.drain_all().next().is_some());
        assert_eq!(order.len(), 1);
    }
}
