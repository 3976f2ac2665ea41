//! The `ironlb` binary: the command line and nothing else.

use std::process::ExitCode;

fn main() -> ExitCode {
    ironlb::cli::main()
}
