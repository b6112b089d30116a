//! Simulated GPU and scenario tests.
