//! Simulated GPU and scenario tests.

pub mod agent;
pub mod capabilities;
pub mod container;
pub mod disk;
pub mod logs;
pub mod machine;
pub mod pythons;
pub mod sim;
pub mod stacks;
pub mod ucx;
pub mod usage;
pub mod wait;
