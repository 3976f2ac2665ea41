//! Empty: lets lb-userspace name this crate as a build dependency, so that cargo rebuilds the object when it changes.
#![no_std]
