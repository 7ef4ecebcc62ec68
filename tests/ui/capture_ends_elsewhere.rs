//! A capture that restricts its thread ends on that thread.
use rstream::capture::{Global, ThreadLocal};
use rstream::{Api, Capture};

fn global(capture: Capture<'static, Global>) {
    std::thread::spawn(move || Api::attach(|api| capture.end(api).is_ok()));
}

fn thread_local(capture: Capture<'static, ThreadLocal>) {
    std::thread::spawn(move || drop(capture));
}

fn main() {}
