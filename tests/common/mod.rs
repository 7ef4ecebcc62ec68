//! What the integration tests share. `RSTREAM_TEST_DEVICE` chooses the device, as for the Python suite.

use std::sync::Mutex;

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
