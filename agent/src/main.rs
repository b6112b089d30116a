//! vramscope.
fn main() {}
