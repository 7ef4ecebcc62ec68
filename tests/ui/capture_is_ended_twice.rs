//! Ending a capture consumes it.
use rstream::capture::Global;
use rstream::{Api, Capture};

fn end(api: &Api<'_>, capture: Capture<'_, Global>) {
    let _ = capture.end(api);
    let _ = capture.end(api);
}

fn main() {}
