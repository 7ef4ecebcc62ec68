//! A full queue of a stream. In a process of its own: beside it other tests' calls block.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use common::{until_blocked, with_stream};
use rstream::capture::Relaxed;
use rstream::{Api, Buffer, Error, Event, EventOptions, Pattern, Stream, StreamOptions, testing};

#[test]
fn a_full_queue_blocks_neither_close_nor_what_is_said_of_events() {
    /// A queue has room for so many operations (measured).
    const ROOM: u64 = 1020;
    with_stream(|api, stream| {
        let other = Stream::new(api, stream.device(), StreamOptions::default())?;
        let capturing = Stream::new(api, stream.device(), StreamOptions::default())?;
        let new_event = || Event::new(api, stream.device(), EventOptions::default());
        let (event, captured) = (new_event()?, new_event()?);
        let memory = Buffer::device_memory(api, stream.device(), 64)?;
        let capture = capturing.begin_capture::<Relaxed>(api)?;
        capturing.record(api, &captured)?;
        let hold = testing::hold(api, stream)?;
        let accepted = Arc::new(AtomicU64::new(0));
        let filler = thread::spawn({
            let (stream, accepted) = (stream.clone(), Arc::clone(&accepted));
            move || {
                Api::attach(|api| {
                    for _ in 0..2 * ROOM {
                        stream.fill(api, &memory, Pattern::U8(1))?;
                        accepted.fetch_add(1, Ordering::AcqRel);
                    }
                    Ok::<(), Error>(())
                })
            }
        });
        // How much is accepted depends on what else the enqueue queues.
        until_blocked(&accepted, ROOM / 4);
        other.close();
        event.close();
        let recorder = thread::spawn({
            let (stream, captured) = (stream.clone(), captured.clone());
            move || Api::attach(|api| stream.record(api, &captured))
        });
        // Also when the record that is to come is in the driver already.
        for _ in 0..100_000 {
            assert!(matches!(captured.query(api), Err(Error::Capture { .. })));
        }
        assert!(!filler.is_finished() && !recorder.is_finished());
        hold.release();
        filler.join().unwrap().unwrap()?;
        recorder.join().unwrap().unwrap()?;
        capture.end(api)?;
        captured.synchronize(api, Some(Duration::from_secs(60)), &mut || false)?;
        stream.synchronize(api, Some(Duration::from_secs(60)), &mut || false)
    });
}
