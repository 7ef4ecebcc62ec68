//! What the benchmarks of the core share: the kinds of host code, and how to queue one of each.

use rstream::{Api, Completion, Device, Signal, Stream, StreamOptions};

/// Queues one piece of host code that does nothing.
pub type Enqueue = fn(&Api<'_>, &Stream) -> Completion<()>;

/// The kinds of host code, by name.
pub const KINDS: [(&str, Enqueue); 4] = [
    ("callback", |api, stream| stream.add_callback(api, |_| ()).unwrap()),
    ("host function", |api, stream| stream.launch_host_func(api, || ()).unwrap()),
    ("continuation", |api, stream| stream.then(api, |_| ()).unwrap()),
    ("notice", |api, stream| stream.completion(api).unwrap()),
];

/// The signals, by name.
pub const SIGNALS: [(&str, Signal); 2] = [("memory", Signal::Memory), ("driver", Signal::Driver)];

/// A call on a stream with nothing queued.
pub type Call = fn(&Api<'_>, &Stream, &rstream::Event);

/// The calls, by name.
pub const CALLS: [(&str, Call); 5] = [
    ("query", |api, stream, _| assert!(stream.query(api).unwrap())),
    ("synchronize", |api, stream, _| stream.synchronize(api, None, &mut || false).unwrap()),
    ("event record", |api, stream, event| stream.record(api, event).unwrap()),
    ("completion", |api, stream, _| assert!(stream.completion(api).unwrap().is_done())),
    ("create and close", |api, stream, _| new_stream(api, stream.device(), Signal::Driver).close()),
];

/// A stream with a signal.
pub fn new_stream(api: &Api<'_>, device: Device, signal: Signal) -> Stream {
    Stream::new(api, device, StreamOptions { signal, ..StreamOptions::default() }).unwrap()
}
