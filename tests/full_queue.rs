//! A full queue of a stream. In a process of its own: beside it other tests' calls block.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use common::with_stream;
use rstream::{Api, Buffer, Error, Event, EventOptions, Pattern, Stream, StreamOptions, testing};

#[test]
fn close_does_not_wait_for_somebody_who_waits_for_room_in_a_queue() {
    /// A queue has room for so many operations (measured).
    const ROOM: u64 = 1020;
    with_stream(|api, stream| {
        let other = Stream::new(api, stream.device(), StreamOptions::default())?;
        let event = Event::new(api, stream.device(), EventOptions::default())?;
        let memory = Buffer::device_memory(api, stream.device(), 64)?;
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
        // Until it is blocked: nothing more is accepted. How much is depends on what else the enqueue queues.
        let (mut before, mut unchanged) = (0, 0);
        while before < ROOM / 4 || unchanged < 100_000 {
            let now = accepted.load(Ordering::Acquire);
            unchanged = if now == before { unchanged + 1 } else { 0 };
            before = now;
            thread::yield_now();
        }
        other.close();
        event.close();
        assert!(!filler.is_finished());
        hold.release();
        filler.join().unwrap().unwrap()?;
        stream.synchronize(api, Some(Duration::from_secs(60)), &mut || false)
    });
}
