//! Words for what the log holds as codes: reasons of loss, results of calls, levels.

use super::model::Of;
use crate::call::Level;

/// What a loss takes away from the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    /// Calls, or what they were about: what is held and what grew may be wrong.
    Account,
    /// `PyTorch`'s totals of a process.
    TensorTotals,
    /// Where memory was allocated: what grows at one place may not show.
    Places,
    /// That it was allocated where it is told to be: it may be credited to another place.
    Credit,
    /// Readings of NVML or facts about processes; the account itself is whole.
    Readings,
}

/// A reason of loss in words, and what it takes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Meaning {
    /// In words; what `count` counts comes first.
    pub(super) text: &'static str,
    /// What it takes away.
    pub(super) takes: Takes,
}

const fn account(text: &'static str) -> Meaning {
    Meaning { text, takes: Takes::Account }
}

const fn places(text: &'static str) -> Meaning {
    Meaning { text, takes: Takes::Places }
}

const fn readings(text: &'static str) -> Meaning {
    Meaning { text, takes: Takes::Readings }
}

const fn other(text: &'static str, takes: Takes) -> Meaning {
    Meaning { text, takes }
}

/// The reasons that this version knows. The agent writes them as `losses.reason`. Each is told with
/// what it does to the figures of the report.
const LOSSES: &[(&str, Meaning)] = &[
    (
        "ring_full",
        account(
            "calls not recorded, what is held may be too much or too little: the kernel buffer was \
             full (raise --ring-size)",
        ),
    ),
    (
        "quota_exceeded",
        account(
            "calls not recorded, what is held may be too much or too little: their user had used up \
             its share of the kernel buffer (raise --ring-size)",
        ),
    ),
    (
        "life_ring_full",
        readings(
            "starts or ends of processes, or backward passes, learnt late or not at all: their \
             buffer was full; times may be late",
        ),
    ),
    (
        "pending_full",
        account(
            "calls not recorded, what is held may be too much or too little: too many were in \
             flight at once",
        ),
    ),
    (
        "pending_overwritten",
        account(
            "calls not recorded, what is held may be too much or too little: their thread entered \
             another traced call before they returned",
        ),
    ),
    (
        "exit_without_enter",
        account(
            "calls not recorded, what is held may be too much or too little: they were in flight \
             when the probes came",
        ),
    ),
    (
        "call_interrupted",
        account("calls whose thread ended inside them: whether they had an effect is not known"),
    ),
    ("out_fault", account("calls whose result could not be read: what they allocated is missing")),
    (
        "struct_fault",
        account(
            "calls with a property that could not be read, such as the device: their bytes may \
             stand with another device or kind of memory",
        ),
    ),
    (
        "process_table_full",
        account(
            "processes whose children or end are not followed: children may be missing, what ended \
             may count as held; the kernel's table of processes was full",
        ),
    ),
    (
        "tensor_table_full",
        other(
            "PyTorch totals not counted, what its allocator holds is too little or missing: the \
             kernel's table of them was full",
            Takes::TensorTotals,
        ),
    ),
    (
        "stack_ring_full",
        places(
            "stacks not taken, of what they allocated the line is not known: their kernel buffer was full",
        ),
    ),
    (
        "thread_table_full",
        places(
            "stacks not taken, of what they allocated the line is not known: the kernel's table of \
             threads was full",
        ),
    ),
    (
        "stack_mismatch",
        other(
            "stacks, of the few that are verified, that were another than the one they were counted \
             under: some allocations may be credited to another line",
            Takes::Credit,
        ),
    ),
    (
        "block_table_full",
        places(
            "PyTorch blocks not counted at their line, which holds more than is told: the kernel's \
             table of them was full",
        ),
    ),
    (
        "site_table_full",
        places(
            "PyTorch blocks not counted at their line, which holds more than is told: the kernel's \
             table of sites was full",
        ),
    ),
    (
        "tensor_free_missed",
        places(
            "frees of PyTorch blocks that went by unseen: until their address was handed out again \
             their line held less than is told",
        ),
    ),
    (
        "undecodable",
        account("records not understood, calls may be missing: agent and kernel half disagree"),
    ),
    (
        "reading_dropped",
        readings("NVML readings dropped, one sample less each: the account was too far behind"),
    ),
    (
        "brake",
        account(
            "functions of a process not recorded any more, since the probes cost it more than \
             --max-overhead: what it holds is not known from then on",
        ),
    ),
    (
        "brake_lines",
        places(
            "times that lines of PyTorch's memory were not recorded any more, since the probes cost \
             their process more than --max-overhead: what lines hold is as of then",
        ),
    ),
    (
        "left_out",
        account(
            "functions left out on demand (--leave-out): what they took or gave was not seen, and is \
             unexplained",
        ),
    ),
    (
        "library_not_probed",
        account("libraries not probed: calls through them were not seen, their memory is missing"),
    ),
    (
        "probes_moved",
        account(
            "times that the probes of a process were taken out and put in again: calls of those \
             milliseconds were not seen",
        ),
    ),
    (
        "log_write_failed",
        account(
            "rows not written, their events are missing: the log could not be written (disk full?)",
        ),
    ),
    (
        "free_not_seen",
        account(
            "frees not seen: the address was handed out again while it counted as held, so that too \
             much was told as held until then",
        ),
    ),
    (
        "alloc_not_seen",
        account(
            "frees of blocks whose allocation was not seen: what was held before is told too low",
        ),
    ),
    (
        "start_not_seen",
        account("processes that used CUDA before their probes were in place: calls may be missing"),
    ),
    (
        "partial_unmap",
        account(
            "unmaps of a part of a mapping, which are not followed: what it maps counts as held",
        ),
    ),
    (
        "after_end",
        account(
            "calls recorded after the end of their process, left out: what they allocated or freed \
             is not counted",
        ),
    ),
    (
        "files_not_read",
        account(
            "files of the log could not be read, they are named below: what they told is missing, \
             what is held may be too much or too little",
        ),
    ),
    (
        "samples_not_read",
        readings(
            "files of readings could not be read, they are named below: what they told is missing",
        ),
    ),
    (
        "rows_before_checkpoint",
        readings(
            "older events are deleted (--max-disk): the account begins with a checkpoint; peaks, \
             growth and failures before it are not told",
        ),
    ),
    (
        "rows_missing",
        account(
            "events missing from the log, what is held may be too much or too little: files deleted \
             or rows not written",
        ),
    ),
];

/// What a reason means. `None` for one that this version does not know: it must be taken for the
/// worst and printed as it is.
pub(super) fn loss(reason: &str) -> Option<Meaning> {
    LOSSES.iter().find(|(known, _)| *known == reason).map(|(_, meaning)| *meaning)
}

/// What a reason takes away; one that is not known, the account.
pub(super) fn takes(reason: &str) -> Takes {
    loss(reason).map_or(Takes::Account, |meaning| meaning.takes)
}

/// Names of the results that occur with traced functions, as `cuda.h` has them.
pub(super) fn result(code: i32) -> Option<&'static str> {
    Some(match code {
        1 => "CUDA_ERROR_INVALID_VALUE",
        2 => "CUDA_ERROR_OUT_OF_MEMORY",
        3 => "CUDA_ERROR_NOT_INITIALIZED",
        4 => "CUDA_ERROR_DEINITIALIZED",
        34 => "CUDA_ERROR_STUB_LIBRARY",
        46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
        100 => "CUDA_ERROR_NO_DEVICE",
        101 => "CUDA_ERROR_INVALID_DEVICE",
        200 => "CUDA_ERROR_INVALID_IMAGE",
        201 => "CUDA_ERROR_INVALID_CONTEXT",
        205 => "CUDA_ERROR_MAP_FAILED",
        206 => "CUDA_ERROR_UNMAP_FAILED",
        208 => "CUDA_ERROR_ALREADY_MAPPED",
        211 => "CUDA_ERROR_NOT_MAPPED",
        214 => "CUDA_ERROR_ECC_UNCORRECTABLE",
        217 => "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
        304 => "CUDA_ERROR_OPERATING_SYSTEM",
        400 => "CUDA_ERROR_INVALID_HANDLE",
        401 => "CUDA_ERROR_ILLEGAL_STATE",
        500 => "CUDA_ERROR_NOT_FOUND",
        600 => "CUDA_ERROR_NOT_READY",
        700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
        701 => "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
        702 => "CUDA_ERROR_LAUNCH_TIMEOUT",
        704 => "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
        708 => "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE",
        709 => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        710 => "CUDA_ERROR_ASSERT",
        712 => "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        713 => "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        719 => "CUDA_ERROR_LAUNCH_FAILED",
        800 => "CUDA_ERROR_NOT_PERMITTED",
        801 => "CUDA_ERROR_NOT_SUPPORTED",
        802 => "CUDA_ERROR_SYSTEM_NOT_READY",
        803 => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        900 => "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        999 => "CUDA_ERROR_UNKNOWN",
        _ => return None,
    })
}

/// What a level's memory is called in sentences.
pub(super) const fn memory(level: Level) -> &'static str {
    match level {
        Level::Device => "device memory",
        Level::Pool => "stream-ordered pool memory",
        Level::Tensor => "PyTorch tensors",
        Level::Managed => "managed memory",
        Level::Host => "pinned host memory",
        Level::Virtual => "address space",
        Level::Imported => "imported memory",
    }
}

/// What a trend is of, in sentences.
pub(super) const fn trend(of: Of) -> &'static str {
    match of {
        Of::Tensors => memory(Level::Tensor),
        Of::TorchReserved => "PyTorch's reserve",
        Of::Device => memory(Level::Device),
        Of::Pool => memory(Level::Pool),
        Of::Managed => memory(Level::Managed),
        Of::Host => memory(Level::Host),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_reason_is_taken_for_the_worst() {
        assert_eq!(loss("gremlins"), None);
        assert_eq!(takes("gremlins"), Takes::Account);
        assert_eq!(takes("reading_dropped"), Takes::Readings);
    }

    #[test]
    fn reasons_are_listed_once() {
        let mut reasons: Vec<_> = LOSSES.iter().map(|(reason, _)| reason).collect();
        reasons.sort_unstable();
        reasons.dedup();
        assert_eq!(reasons.len(), LOSSES.len());
    }
}
