#![no_std]
//! Wire format between the kernel half and the agent.
