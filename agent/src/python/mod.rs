//! Python stacks, the agent's half: finds the interpreter of a process and where it keeps its
//! frames, and turns the code objects that the kernel half copied into names and lines.
//!
//! The kernel half walks the frames of the thread that calls: it reads addresses, never names of
//! more than a fixed length, and interprets nothing. What a process writes into its own memory is
//! its own choice, so everything read here is bounded, and what makes no sense is no line and no
//! name, never a wrong one.

mod code;
mod find;
mod image;
mod layout;
mod lines;
mod memory;
mod reread;
mod target;
mod text;

pub use self::{
    code::{Code, decode},
    find::{Found, Interpreter, find},
    lines::{LineFormat, line_at},
    memory::{Memory, memory},
};

pub(crate) use self::{image::Image, lines::line_in_part};

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
