//! A callback runs on another thread.
use std::rc::Rc;

use rstream::{Api, Stream};

fn enqueue(api: &Api<'_>, stream: &Stream) {
    let local = Rc::new(());
    let _ = stream.add_callback(api, move |_status| drop(local));
}

fn main() {}
