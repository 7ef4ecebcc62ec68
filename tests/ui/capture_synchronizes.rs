//! A capture offers only what can be captured.
use rstream::capture::Relaxed;
use rstream::{Api, Capture};

fn ask(api: &Api<'_>, capture: &Capture<'_, Relaxed>) {
    let _ = capture.query(api);
    let _ = capture.synchronize(api, None, &mut || false);
    let _ = capture.add_callback(api, |_status| ());
}

fn main() {}
