//! Steps through functions whose frames are described by expressions, which framehop does not
//! evaluate where they read the stack.
//!
//! A function that realigns its stack (for vectors, mostly) states its caller's stack pointer that
//! way. framehop follows the frame pointer instead, gets the right return address and a wrong
//! stack pointer, and ends some frames later in what looks like the bottom of the stack.

use gimli::{
    CallFrameInstruction, CfaRule, EndianSlice, Evaluation, EvaluationResult, LittleEndian,
    Location, Register, RegisterRule, UnwindContext, UnwindExpression, Value,
};

use super::cfi::{Function, Section, eh_frame};

#[cfg(target_arch = "x86_64")]
const SP: Register = gimli::X86_64::RSP;
#[cfg(target_arch = "x86_64")]
const FP: Register = gimli::X86_64::RBP;
#[cfg(target_arch = "x86_64")]
const RET: Register = gimli::X86_64::RA;

#[cfg(target_arch = "aarch64")]
const SP: Register = gimli::AArch64::SP;
#[cfg(target_arch = "aarch64")]
const FP: Register = gimli::AArch64::X29;
#[cfg(target_arch = "aarch64")]
const RET: Register = gimli::AArch64::X30;

/// Operations of one expression; those of compilers have up to eight.
const OPERATION_LIMIT: u32 = 256;

/// The registers that unwinding follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Followed {
    /// Address of the instruction.
    pub(super) ip: u64,
    /// Stack pointer.
    pub(super) sp: u64,
    /// Frame pointer.
    pub(super) fp: u64,
}

/// The caller of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Caller {
    /// Its registers.
    Found(Followed),
    /// There is none: the bottom of the stack.
    None,
}

/// Whether a function's record has a rule that framehop replaces by one of its own.
pub(super) fn is_needed(function: &Function) -> bool {
    let section = eh_frame(&function.section);
    let bases = function.bases();
    let Some(entry) = function.entry(&section, &bases) else { return false };
    let mut common = entry.cie().instructions(&section, &bases);
    let mut own = entry.instructions(&section, &bases);
    let instructions =
        std::iter::from_fn(|| common.next().ok()?).chain(std::iter::from_fn(|| own.next().ok()?));
    instructions.into_iter().any(|instruction| match instruction {
        CallFrameInstruction::DefCfaExpression { .. } => true,
        CallFrameInstruction::DefCfa { register, .. }
        | CallFrameInstruction::DefCfaRegister { register } => register != SP && register != FP,
        CallFrameInstruction::Expression { register, .. }
        | CallFrameInstruction::ValExpression { register, .. } => register == FP || register == RET,
        _ => false,
    })
}

/// Evaluates the rules of a function at a stated address; `None` where a rule needs what is not
/// known, such as another register, or a read fails.
pub(super) fn step(
    function: &Function,
    svma: u64,
    regs: Followed,
    read: &mut dyn FnMut(u64) -> Option<u64>,
) -> Option<Caller> {
    let section = eh_frame(&function.section);
    let bases = function.bases();
    let entry = function.entry(&section, &bases)?;
    let mut context = UnwindContext::new();
    let row = entry.unwind_info_for_address(&section, &bases, &mut context, svma).ok()?;
    let mut frame = Frame { section, encoding: entry.cie().encoding(), regs, read };
    let cfa = match row.cfa() {
        CfaRule::RegisterAndOffset { register, offset } => {
            frame.register(*register)?.checked_add_signed(*offset)?
        }
        CfaRule::Expression(expression) => frame.evaluate(expression, None)?,
    };
    let fp = match row.register(FP) {
        None | Some(RegisterRule::Undefined) => regs.fp,
        Some(rule) => frame.value(&rule, FP, cfa)?,
    };
    match row.register(RET) {
        None | Some(RegisterRule::Undefined) => Some(Caller::None),
        Some(rule) => {
            let ip = frame.value(&rule, RET, cfa)?;
            Some(Caller::Found(Followed { ip, sp: cfa, fp }))
        }
    }
}

struct Frame<'a> {
    section: Section<'a>,
    encoding: gimli::Encoding,
    regs: Followed,
    read: &'a mut dyn FnMut(u64) -> Option<u64>,
}

impl Frame<'_> {
    fn register(&self, register: Register) -> Option<u64> {
        match register {
            SP => Some(self.regs.sp),
            FP => Some(self.regs.fp),
            // x86-64 names the instruction pointer so, in the stubs that call other libraries.
            RET if cfg!(target_arch = "x86_64") => Some(self.regs.ip),
            _ => None,
        }
    }

    /// What a register held in the caller.
    fn value(&mut self, rule: &RegisterRule<usize>, own: Register, cfa: u64) -> Option<u64> {
        match rule {
            RegisterRule::SameValue => self.register(own),
            RegisterRule::Offset(offset) => (self.read)(cfa.checked_add_signed(*offset)?),
            RegisterRule::ValOffset(offset) => cfa.checked_add_signed(*offset),
            RegisterRule::Register(register) => self.register(*register),
            RegisterRule::Expression(expression) => {
                let addr = self.evaluate(expression, Some(cfa))?;
                (self.read)(addr)
            }
            RegisterRule::ValExpression(expression) => self.evaluate(expression, Some(cfa)),
            _ => None,
        }
    }

    fn evaluate(
        &mut self,
        expression: &UnwindExpression<usize>,
        first: Option<u64>,
    ) -> Option<u64> {
        let expression = expression.get(&self.section).ok()?;
        let mut evaluation: Evaluation<EndianSlice<'_, LittleEndian>> =
            expression.evaluation(self.encoding);
        evaluation.set_max_iterations(OPERATION_LIMIT);
        if let Some(first) = first {
            evaluation.set_initial_value(first);
        }
        let mut result = evaluation.evaluate().ok()?;
        loop {
            result = match result {
                EvaluationResult::Complete => break,
                EvaluationResult::RequiresRegister { register, .. } => {
                    let value = Value::Generic(self.register(register)?);
                    evaluation.resume_with_register(value).ok()?
                }
                EvaluationResult::RequiresMemory { address, size: 8, space: None, .. } => {
                    let value = Value::Generic((self.read)(address)?);
                    evaluation.resume_with_memory(value).ok()?
                }
                _ => return None,
            };
        }
        match evaluation.as_result().last()?.location {
            Location::Address { address } => Some(address),
            _ => None,
        }
    }
}
