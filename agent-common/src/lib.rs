//! Wire format between vramscope's kernel half and its agent: the only code that both halves read.
//!
//! Plain integers only, `repr(C)`, padding spelled out, sizes and offsets asserted. Records cross
//! as bytes; an agent that meets a record of another kind or length counts it and goes on.
#![no_std]

pub mod call;
pub mod cookie;
pub mod cost;
pub mod life;
pub mod loss;
pub mod offsets;
pub mod python;
pub mod quota;
pub mod scope;
pub mod stack;
pub mod tensor;
