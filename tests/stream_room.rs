//! Room for streams, in a process that has no others.

mod common;

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use common::with_stream;
use rstream::{Api, Device, Error, Stream, StreamOptions, testing};

#[test]
fn streams_that_were_reserved_are_made_beside_a_stream_that_waits() {
    /// More than the driver has room for at first, and than the tests reserve.
    const STREAMS: usize = 300;
    with_stream(|api, stream| {
        let device = stream.device();
        device.reserve_streams(api, 0)?;
        device.reserve_streams(api, STREAMS)?;
        let hold = testing::hold(api, stream)?;
        let (makes, made) = mpsc::channel();
        let maker = thread::spawn(move || {
            Api::attach(|api| {
                let streams = (0..STREAMS).map(|_| Stream::new(api, device, StreamOptions::default()));
                makes.send(streams.collect::<Result<Vec<_>, Error>>()).unwrap();
            })
        });
        let in_time = made.recv_timeout(Duration::from_secs(30));
        hold.release();
        maker.join().unwrap().unwrap();
        assert_eq!(in_time.expect("made while a stream waits")?.len(), STREAMS);
        let error = device.reserve_streams(api, Device::MOST_RESERVED_STREAMS + 1).unwrap_err();
        assert!(error.to_string().contains("4097"), "{error}");
        Ok(())
    });
}
