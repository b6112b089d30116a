//! Simulated GPU and scenario tests.

pub mod sim;
