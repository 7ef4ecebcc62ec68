//! Nor can a host function.
use rstream::{Api, Stream};

fn enqueue(api: &Api<'_>, stream: &Stream) {
    let again = stream.clone();
    let _ = stream.launch_host_func(api, move || again.synchronize(api, None, &mut || false));
}

fn main() {}
