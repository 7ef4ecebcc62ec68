//! Room for streams, in a process that has no others.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use common::{alone, until_blocked, with_stream};
use rstream::{Api, Device, Error, Event, EventOptions, Stream, StreamOptions, testing};

#[test]
fn streams_that_were_reserved_are_made_beside_a_stream_that_waits() {
    /// More than the driver has room for at first, and than the tests reserve.
    const STREAMS: usize = 300;
    let _alone = alone();
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

#[test]
fn close_does_not_wait_for_somebody_who_waits_for_room_for_a_stream() {
    /// More than there is room for after the test above, or the tests' own reservation.
    const STREAMS: usize = 500;
    let _alone = alone();
    with_stream(|api, stream| {
        let device = stream.device();
        let other = Stream::new(api, device, StreamOptions::default())?;
        let event = Event::new(api, device, EventOptions::default())?;
        let hold = testing::hold(api, stream)?;
        let made = Arc::new(AtomicU64::new(0));
        let maker = thread::spawn({
            let made = Arc::clone(&made);
            move || {
                Api::attach(|api| {
                    let stream = |_| {
                        let stream = Stream::new(api, device, StreamOptions::default())?;
                        made.fetch_add(1, Ordering::AcqRel);
                        Ok::<_, Error>(stream)
                    };
                    (0..STREAMS).map(stream).collect::<Result<Vec<_>, Error>>()
                })
            }
        });
        until_blocked(&made, 1);
        other.close();
        event.close();
        assert!(!maker.is_finished());
        hold.release();
        maker.join().unwrap().unwrap().map(drop)
    });
}
