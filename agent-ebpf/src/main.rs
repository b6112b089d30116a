//! vramscope's kernel half.
fn main() {}
