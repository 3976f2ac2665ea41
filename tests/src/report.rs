//! A report to read: parts with findings, each of which is as it must be or not.

/// The report so far.
#[derive(Debug, Default)]
pub struct Report {
    parts: u32,
    /// How many findings were not as they must be.
    pub failed: u32,
}

impl Report {
    /// Begins a part.
    pub fn part(&mut self, title: &str) {
        self.parts += 1;
        println!("\n{}. {title}", self.parts);
    }

    /// Tells a finding, and whether it is as it must be.
    pub fn check(&mut self, good: bool, finding: &str) {
        let mark = if good { "ok    " } else { "FAILED" };
        println!("   {mark} {finding}");
        self.failed += u32::from(!good);
    }

    /// Tells something that is neither good nor bad, line by line.
    pub fn show(&self, text: &str) {
        for line in text.lines() {
            println!("          {line}");
        }
    }
}
