//! Writes the dialogues that the fuzzer begins with to `fuzz/seeds`.

use std::fs;

use lb_host::{corpus, seeds};

fn main() -> std::io::Result<()> {
    let folder = corpus::folder();
    fs::create_dir_all(&folder)?;
    for (name, dialogue) in seeds::seeds() {
        fs::write(folder.join(name), corpus::write(&dialogue))?;
    }
    println!("wrote {}", folder.display());
    Ok(())
}
