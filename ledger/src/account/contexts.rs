//! Which context is current on which thread, and which device a context is on.

use std::collections::HashMap;

/// Depth of a thread's stack that is kept; a program that pushes without end (or whose pops were
/// lost) costs no more memory than this.
const MAX_DEPTH: usize = 64;

/// A live context.
#[derive(Clone, Copy, Debug)]
struct Context {
    ordinal: i32,
    since_ns: i64,
    /// Retains of a primary context; `None` for one that `cuCtxCreate` made.
    retains: Option<u32>,
    /// Users beyond the first of one that `cuCtxCreate` made.
    attached: u32,
}

/// Where an allocation was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// `CUcontext`.
    pub(super) ctx: Option<u64>,
    /// CUDA ordinal of its device.
    pub(super) ordinal: Option<i32>,
}

/// Whether a process has had one context, and which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ever {
    None,
    One(u64),
    Many,
}

/// Contexts of one process.
#[derive(Debug)]
pub(super) struct Contexts {
    live: HashMap<u64, Context>,
    primary: HashMap<i32, u64>,
    threads: HashMap<u32, Vec<u64>>,
    ever: Ever,
    /// The device of all contexts that were made before the process was attached to.
    before_attach: Option<i32>,
}

impl Default for Contexts {
    fn default() -> Self {
        Self {
            live: HashMap::new(),
            primary: HashMap::new(),
            threads: HashMap::new(),
            ever: Ever::None,
            before_attach: None,
        }
    }
}

impl Contexts {
    /// Where the thread allocates: its current context and that one's device.
    ///
    /// A thread of which no context is known is placed only in a process that was seen from its
    /// start (`from_start`) and has had one context ever: an allocation that succeeded needs a
    /// context, and there is no other. In a process that was attached to, a context that is not
    /// known is from before, and its device is known where all of those are on one. Everything else
    /// would be a guess.
    pub(super) fn place(&self, tid: u32, from_start: bool) -> Place {
        let current = self.threads.get(&tid).and_then(|stack| stack.last()).copied();
        let ctx = current.or(match self.ever {
            Ever::One(ctx) if from_start && self.live.contains_key(&ctx) => Some(ctx),
            _ => None,
        });
        let ordinal = ctx.and_then(|ctx| self.ordinal(ctx));
        Place { ctx, ordinal: ordinal.or(self.before_attach) }
    }

    /// The device of every context that the process has, where they are all on one.
    pub(super) fn only_ordinal(&self) -> Option<i32> {
        let mut ordinals = self.live.values().map(|context| context.ordinal);
        let first = ordinals.next().or(self.before_attach)?;
        let same = |ordinal: i32| ordinal == first;
        (ordinals.all(same) && self.before_attach.is_none_or(same)).then_some(first)
    }

    /// Contexts from before attach are all on this device.
    pub(super) fn set_before_attach(&mut self, ordinal: i32) {
        self.before_attach = Some(ordinal);
    }

    /// Device of a context.
    pub(super) fn ordinal(&self, ctx: u64) -> Option<i32> {
        self.live.get(&ctx).map(|context| context.ordinal)
    }

    /// The device's primary context.
    pub(super) fn primary(&self, ordinal: i32) -> Option<u64> {
        self.primary.get(&ordinal).copied()
    }

    /// A new context, current on the thread. True: the handle named another context before, whose
    /// end was not seen.
    pub(super) fn create(&mut self, tid: u32, ctx: u64, ordinal: i32, since_ns: i64) -> bool {
        self.push(tid, ctx);
        self.adopt(ctx, ordinal, since_ns)
    }

    /// A new context that is current nowhere. True as for [`Contexts::create`].
    pub(super) fn adopt(&mut self, ctx: u64, ordinal: i32, since_ns: i64) -> bool {
        self.saw(ctx);
        let made = Context { ordinal, since_ns, retains: None, attached: 0 };
        self.live.insert(ctx, made).is_some()
    }

    /// One more user of a context.
    pub(super) fn attach(&mut self, ctx: u64) {
        if let Some(context) = self.live.get_mut(&ctx) {
            context.attached = context.attached.saturating_add(1);
        }
    }

    /// One user less. True: that was the last one, [`Contexts::destroy`] it.
    pub(super) fn detach(&mut self, ctx: u64) -> bool {
        let Some(context) = self.live.get_mut(&ctx) else { return false };
        let last = context.attached == 0;
        context.attached = context.attached.saturating_sub(1);
        last
    }

    /// One more user of a primary context; the first one makes it. True as for
    /// [`Contexts::create`].
    pub(super) fn retain(&mut self, ctx: u64, ordinal: i32, since_ns: i64) -> bool {
        self.saw(ctx);
        self.primary.insert(ordinal, ctx);
        match self.live.get_mut(&ctx) {
            Some(Context { ordinal: at, retains: Some(retains), .. }) if *at == ordinal => {
                *retains = retains.saturating_add(1);
                false
            }
            _ => {
                let made = Context { ordinal, since_ns, retains: Some(1), attached: 0 };
                self.live.insert(ctx, made).is_some()
            }
        }
    }

    /// `cuCtxDestroy` that entered at `enter_ns`. False: the handle has been handed out again
    /// since, the context that was meant is gone already.
    pub(super) fn destroy(&mut self, tid: u32, ctx: u64, enter_ns: i64) -> bool {
        if self.live.get(&ctx).is_some_and(|context| context.since_ns > enter_ns) {
            return false;
        }
        self.live.remove(&ctx);
        if let Some(stack) = self.threads.get_mut(&tid)
            && stack.last() == Some(&ctx)
        {
            stack.pop();
        }
        true
    }

    /// One user of the primary context less; gives the context where that was the last.
    pub(super) fn release(&mut self, ordinal: i32) -> Option<u64> {
        let ctx = self.primary(ordinal)?;
        let retains = self.live.get_mut(&ctx)?.retains.as_mut()?;
        *retains = retains.saturating_sub(1);
        if *retains > 0 {
            return None;
        }
        self.live.remove(&ctx);
        Some(ctx)
    }

    /// `cuDevicePrimaryCtxReset*`: gives the context whose contents are destroyed.
    ///
    /// The retains stay, as NVIDIA's manual says, with the `_v2` function (`keeps`); the older one
    /// takes one of them away (both seen on an H200, driver 580). The next retain makes the context
    /// anew, under the same handle.
    pub(super) fn reset(&mut self, ordinal: i32, keeps: bool) -> Option<u64> {
        let ctx = self.primary(ordinal)?;
        if !keeps {
            self.release(ordinal);
        }
        Some(ctx)
    }

    /// `cuCtxSetCurrent`: replaces the top, or pops it.
    pub(super) fn set(&mut self, tid: u32, ctx: u64) {
        let stack = self.threads.entry(tid).or_default();
        stack.pop();
        if ctx != 0 {
            stack.push(ctx);
            self.saw(ctx);
        }
    }

    /// `cuCtxPushCurrent`.
    pub(super) fn push(&mut self, tid: u32, ctx: u64) {
        self.saw(ctx);
        let stack = self.threads.entry(tid).or_default();
        if stack.len() == MAX_DEPTH {
            stack.remove(0);
        }
        stack.push(ctx);
    }

    /// `cuCtxPopCurrent`.
    pub(super) fn pop(&mut self, tid: u32) {
        if let Some(stack) = self.threads.get_mut(&tid) {
            stack.pop();
        }
    }

    fn saw(&mut self, ctx: u64) {
        self.ever = match self.ever {
            Ever::None => Ever::One(ctx),
            Ever::One(one) if one == ctx => Ever::One(one),
            _ => Ever::Many,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ordinal(contexts: &Contexts, tid: u32) -> Option<i32> {
        contexts.place(tid, false).ordinal
    }

    #[test]
    fn set_replaces_the_top_and_zero_pops_it() {
        let mut contexts = Contexts::default();
        contexts.retain(0xa, 0, 1);
        contexts.retain(0xb, 1, 2);
        contexts.set(1, 0xa);
        contexts.push(1, 0xb);
        assert_eq!(ordinal(&contexts, 1), Some(1));
        contexts.set(1, 0xa);
        assert_eq!(ordinal(&contexts, 1), Some(0));
        contexts.pop(1);
        assert_eq!(ordinal(&contexts, 1), Some(0), "the one below the replaced top");
        contexts.set(1, 0);
        assert_eq!(contexts.place(1, false), Place::default());
        contexts.pop(1);
        assert_eq!(ordinal(&contexts, 2), None, "another thread has its own stack");
    }

    #[test]
    fn the_only_context_of_a_process_seen_whole_is_everybodys() {
        let mut contexts = Contexts::default();
        contexts.retain(0xa, 3, 1);
        assert_eq!(contexts.place(9, true), Place { ctx: Some(0xa), ordinal: Some(3) });
        assert_eq!(contexts.place(9, false), Place::default());
        contexts.push(1, 0xb);
        assert_eq!(contexts.place(9, true), Place::default(), "there is a second one");
    }

    #[test]
    fn a_context_from_before_attach_has_no_known_device() {
        let mut contexts = Contexts::default();
        contexts.set(1, 0xa);
        assert_eq!(contexts.place(1, false), Place { ctx: Some(0xa), ordinal: None });
    }

    #[test]
    fn the_last_detach_ends_a_context() {
        let mut contexts = Contexts::default();
        contexts.create(1, 0xa, 0, 1);
        contexts.attach(0xa);
        assert!(!contexts.detach(0xa));
        assert!(contexts.detach(0xa));
        assert!(!contexts.detach(0xb), "one that is not known");
    }

    #[test]
    fn the_last_release_ends_a_primary_context() {
        let mut contexts = Contexts::default();
        contexts.retain(0xa, 0, 1);
        contexts.retain(0xa, 0, 2);
        assert_eq!(contexts.release(0), None);
        assert_eq!(contexts.release(0), Some(0xa));
        assert_eq!(contexts.release(0), None);
        assert_eq!(contexts.release(5), None);
    }

    #[test]
    fn a_reset_keeps_the_retains_or_takes_one() {
        let mut contexts = Contexts::default();
        contexts.retain(0xa, 0, 1);
        assert_eq!(contexts.reset(0, true), Some(0xa));
        contexts.retain(0xa, 0, 2);
        assert_eq!(contexts.release(0), None);
        assert_eq!(contexts.reset(0, false), Some(0xa));
        assert_eq!(contexts.ordinal(0xa), None);
        contexts.retain(0xa, 0, 3);
        assert_eq!(contexts.release(0), Some(0xa));
        assert_eq!(contexts.reset(9, false), None);
    }

    #[test]
    fn a_destroy_that_entered_before_the_handle_came_back_is_not_meant_for_it() {
        let mut contexts = Contexts::default();
        assert!(!contexts.create(1, 0xa, 0, 10));
        assert!(contexts.create(2, 0xa, 1, 30), "the end of the first was not seen yet");
        assert!(!contexts.destroy(1, 0xa, 20));
        assert_eq!(contexts.ordinal(0xa), Some(1));
        assert!(contexts.destroy(2, 0xa, 40));
        assert_eq!(contexts.place(2, false), Place::default(), "destroy pops its own thread");
    }

    #[test]
    fn endless_pushes_are_bounded() {
        let mut contexts = Contexts::default();
        for ctx in 1..200 {
            contexts.push(1, ctx);
        }
        assert_eq!(contexts.threads[&1].len(), MAX_DEPTH);
        assert_eq!(contexts.place(1, false).ctx, Some(199));
    }
}
