//! A callback cannot have a token, so it cannot call the driver.
use rstream::{Api, Stream};

fn enqueue(api: &Api<'_>, stream: &Stream) {
    let again = stream.clone();
    let _ = stream.add_callback(api, move |_status| again.query(api));
}

fn main() {}
