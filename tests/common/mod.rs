//! What the integration tests share. `RSTREAM_TEST_DEVICE` chooses the device, as for the Python suite.

#![allow(dead_code, reason = "no test program uses all of it")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread;

use rstream::{Api, Device, Result, Stream, StreamOptions};

/// `"soft"`, or `"gpu"` for GPU 0. With room for the streams of all tests of a program: tests that run side by side would
/// else wait for streams that others hold.
pub fn device(api: &Api<'_>) -> Result<Device> {
    static RESERVED: Mutex<bool> = Mutex::new(false);
    let device = match std::env::var("RSTREAM_TEST_DEVICE").as_deref() {
        Ok("gpu") => Device::gpu(api, 0),
        Ok("soft") | Err(_) => Device::soft(api, 0),
        Ok(other) => panic!("RSTREAM_TEST_DEVICE={other}: expected soft or gpu"),
    }?;
    let mut reserved = RESERVED.lock().unwrap();
    if !*reserved {
        device.reserve_streams(api, 128)?;
        *reserved = true;
    }
    Ok(device)
}

/// Calls `test` with a token and a new stream on the device under test.
pub fn with_stream(test: impl FnOnce(&Api<'_>, &Stream) -> Result<()>) {
    Api::attach(|api| {
        let stream = Stream::new(api, device(api)?, StreamOptions::default())?;
        test(api, &stream)
    })
    .expect("a test's thread runs no callback")
    .unwrap();
}

/// For tests of one program that must not run side by side.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap()
}

/// Waits until the thread that counts `calls` is blocked in one: until the count, which was `least` at least, does not grow.
pub fn until_blocked(calls: &AtomicU64, least: u64) {
    let (mut before, mut unchanged) = (0, 0);
    while before < least || unchanged < 100_000 {
        let now = calls.load(Ordering::Acquire);
        unchanged = if now == before { unchanged + 1 } else { 0 };
        before = now;
        thread::yield_now();
    }
}
