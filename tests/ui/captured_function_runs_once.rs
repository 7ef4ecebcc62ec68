//! A captured host function runs once for each launch, so it cannot give away what it owns.
use rstream::capture::Global;
use rstream::{Api, Capture};

fn add(api: &Api<'_>, capture: &Capture<'_, Global>) {
    let owned = String::from("given away");
    let _ = capture.launch_host_func(api, move || drop(owned));
}

fn main() {}
