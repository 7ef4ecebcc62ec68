//! A callback may run after its enqueuer returned, so it cannot borrow from it.
use rstream::{Api, Stream};

fn enqueue(api: &Api<'_>, stream: &Stream) {
    let local = String::from("gone when this returns");
    let _ = stream.add_callback(api, |_status| local.len());
}

fn main() {}
