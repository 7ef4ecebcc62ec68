//! Host code on a stream: order, exactly once, results, and what is refused.

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use common::{device, with_stream};
use rstream::{Api, Buffer, Error, Event, EventOptions, Pattern, Signal, Status, Stream, StreamOptions, testing};

const PATIENCE: Duration = Duration::from_secs(60);

fn synchronize(api: &Api<'_>, stream: &Stream) -> rstream::Result<()> {
    stream.synchronize(api, Some(PATIENCE), &mut || false)
}

#[test]
fn the_three_kinds_run_once_each_in_order_and_give_their_results() {
    with_stream(|api, stream| {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let note = |name: &'static str| {
            let seen = Arc::clone(&seen);
            move || {
                seen.lock().unwrap().push(name);
                name
            }
        };
        let (callback, function, notice) = (note("callback"), note("function"), stream.completion(api)?);
        let callback = stream.add_callback(api, move |status| (status, callback()))?;
        let function = stream.launch_host_func(api, function)?;
        let after = note("continuation");
        let continuation = stream.then(api, move |_api| after())?;
        assert_eq!(continuation.into_result(None)?, "continuation");
        assert_eq!(callback.into_result(None)?, (Status::SUCCESS, "callback"));
        assert_eq!(function.status(), Some(Status::SUCCESS));
        assert_eq!(function.into_result(None)?, "function");
        notice.into_result(None)?;
        assert_eq!(*seen.lock().unwrap(), ["callback", "function", "continuation"]);
        assert_eq!(stream.pending(), 0);
        Ok(())
    });
}

#[test]
fn the_stream_waits_for_a_callback_but_not_for_a_continuation() {
    with_stream(|api, stream| {
        let buffer = Buffer::pinned(api, stream.device(), 4)?;
        stream.fill(api, &buffer, Pattern::U32(1))?;
        synchronize(api, stream)?;
        let word = buffer.ptr() as usize;
        // SAFETY: the buffer is alive whenever this is called, and only the stream writes to it, by single words.
        let read = move || unsafe { std::ptr::read_volatile(word as *const u32) };
        let inside = stream.add_callback(api, move |_| read())?;
        stream.fill(api, &buffer, Pattern::U32(2))?;
        assert_eq!(inside.into_result(None)?, 1);

        let (release, blocked) = channel::<()>();
        let continuation = stream.then(api, move |_| blocked.recv().is_ok())?;
        stream.fill(api, &buffer, Pattern::U32(3))?;
        synchronize(api, stream)?;
        assert_eq!(read(), 3);
        assert!(!continuation.is_done());
        release.send(()).unwrap();
        assert!(continuation.into_result(None)?);
        Ok(())
    });
}

#[test]
fn a_callback_gets_no_token_and_a_continuation_may_enqueue_on_its_own_stream() {
    with_stream(|api, stream| {
        let refused = stream.add_callback(api, |_| Api::attach(|_| ()))?;
        assert!(matches!(refused.into_result(None)?, Err(Error::NotPermitted { .. })));
        let again = stream.clone();
        let inner = stream.then(api, move |api| again.add_callback(api, |_| 7).map_err(Error::from))?;
        assert_eq!(inner.into_result(None)??.into_result(None)?, 7);
        Ok(())
    });
}

#[test]
fn a_panic_is_the_result_and_the_next_callback_runs() {
    with_stream(|api, stream| {
        let panics = stream.add_callback(api, |_| panic!("on purpose"))?;
        let next = stream.add_callback(api, |_| 1)?;
        assert_eq!(panics.into_result(None), Err::<(), _>(Error::Panicked { message: "on purpose".into() }));
        assert_eq!(next.into_result(None)?, 1);
        Ok(())
    });
}

#[test]
fn a_cancelled_callback_does_not_run_and_keeps_its_place() {
    with_stream(|api, stream| {
        let hold = testing::hold(api, stream)?;
        let ran = Arc::new(AtomicBool::new(false));
        let inside = Arc::clone(&ran);
        let cancelled = stream.add_callback(api, move |_| inside.store(true, Ordering::Release))?;
        let next = stream.add_callback(api, |_| ())?;
        assert!(cancelled.cancel());
        hold.release();
        next.into_result(None)?;
        assert_eq!(cancelled.into_result(None), Err(Error::Cancelled));
        assert!(!ran.load(Ordering::Acquire));
        Ok(())
    });
}

#[test]
fn host_code_of_a_closed_stream_still_runs() {
    with_stream(|api, stream| {
        let hold = testing::hold(api, stream)?;
        let count = Arc::new(AtomicUsize::new(0));
        let completions = (0..100)
            .map(|_| {
                let count = Arc::clone(&count);
                stream.add_callback(api, move |_| count.fetch_add(1, Ordering::AcqRel))
            })
            .collect::<Result<Vec<_>, _>>()?;
        stream.close();
        stream.close();
        assert_eq!(stream.query(api), Err(Error::Closed { what: "Stream" }));
        let refused = stream.add_callback(api, |_| 5).unwrap_err();
        assert_eq!((refused.returned)(Status::SUCCESS), 5);
        hold.release();
        for completion in completions {
            completion.into_result(None)?;
        }
        assert_eq!(count.load(Ordering::Acquire), 100);
        Ok(())
    });
}

#[test]
fn continuations_stay_in_order_through_two_handles_whatever_the_signal() {
    with_stream(|api, stream| {
        for signal in [Signal::Driver, Signal::Memory] {
            let options = StreamOptions { signal, ..StreamOptions::default() };
            let owner = Stream::new(api, stream.device(), options)?;
            // SAFETY: the owner lives longer.
            let adopted = unsafe { Stream::from_raw(api, owner.device(), owner.handle()?, None) }?;
            assert_eq!((owner.signal(), adopted.signal()), (signal, signal));
            let seen = Arc::new(Mutex::new(Vec::new()));
            let hold = testing::hold(api, &owner)?;
            let completions = (0..400)
                .map(|number| {
                    let seen = Arc::clone(&seen);
                    let handle = if number % 2 == 0 { &owner } else { &adopted };
                    handle.then(api, move |_| seen.lock().unwrap().push(number))
                })
                .collect::<Result<Vec<_>, _>>()?;
            hold.release();
            for completion in completions {
                completion.into_result(None)?;
            }
            assert!(seen.lock().unwrap().iter().copied().eq(0..400));
        }
        Ok(())
    });
}

#[test]
fn a_drop_inside_a_callback_is_safe() {
    with_stream(|api, stream| {
        let other = Stream::new(api, stream.device(), StreamOptions::default())?;
        let event = Event::new(api, stream.device(), EventOptions::default())?;
        let buffer = Buffer::device_memory(api, stream.device(), 1 << 16)?;
        stream.add_callback(api, move |_| drop((other, event, buffer)))?.into_result(None)
    });
}

#[test]
fn a_timed_out_synchronize_can_be_called_again() {
    with_stream(|api, stream| {
        let hold = testing::hold(api, stream)?;
        let timeout = Duration::from_millis(5);
        for _ in 0..2 {
            let waited = stream.synchronize(api, Some(timeout), &mut || false);
            assert_eq!(waited, Err(Error::Timeout { waited: timeout }));
        }
        assert_eq!(stream.synchronize(api, None, &mut || true), Err(Error::Interrupted));
        hold.release();
        synchronize(api, stream)
    });
}

#[test]
fn streams_wait_for_events_and_for_each_other() {
    with_stream(|api, stream| {
        let second = Stream::new(api, stream.device(), StreamOptions::default())?;
        let third = Stream::new(api, stream.device(), StreamOptions::default())?;
        let event = Event::new(api, stream.device(), EventOptions::default())?;
        let hold = testing::hold(api, stream)?;
        stream.record(api, &event)?;
        second.wait_event(api, &event)?;
        third.wait_stream(api, &second)?;
        let reached = event.completion(api)?;
        let last = third.completion(api)?;
        assert!(!event.query(api)? && !second.query(api)? && !third.query(api)?);
        assert!(!reached.is_done() && !last.is_done());
        hold.release();
        last.into_result(None)?;
        reached.into_result(None)?;
        assert!(event.query(api)?);
        Ok(())
    });
}

#[test]
fn to_wait_for_many_events_needs_no_room() {
    /// More than there is room for streams, of which each that is made beyond would wait for the one that is held.
    const EVENTS: usize = 400;
    with_stream(|api, stream| {
        let hold = testing::hold(api, stream)?;
        let completions = (0..EVENTS).map(|_| {
            let event = Event::new(api, stream.device(), EventOptions::default())?;
            stream.record(api, &event)?;
            event.completion(api)
        });
        let completions = completions.collect::<Result<Vec<_>, Error>>()?;
        assert!(completions.iter().all(|completion| !completion.is_done()));
        hold.release();
        completions.into_iter().try_for_each(|completion| completion.into_result(Some(PATIENCE)))
    });
}

#[test]
fn elapsed_time_is_measured_and_wrong_events_are_named() {
    with_stream(|api, stream| {
        let timed = EventOptions { timing: true, ..EventOptions::default() };
        let (start, end) = (Event::new(api, stream.device(), timed)?, Event::new(api, stream.device(), timed)?);
        stream.record(api, &start)?;
        testing::spin(api, stream, Duration::from_millis(2))?;
        stream.record(api, &end)?;
        end.synchronize(api, None, &mut || false)?;
        assert!(end.elapsed_since(api, &start)? >= 1.9);
        assert!(start.elapsed_since(api, &end)? <= -1.9);
        let untimed = Event::new(api, stream.device(), EventOptions::default())?;
        assert!(matches!(untimed.elapsed_since(api, &start), Err(Error::InvalidValue { .. })));
        Ok(())
    });
}

#[test]
fn buffers_dropped_while_their_copy_is_queued_are_still_copied() {
    with_stream(|api, stream| {
        let result = Buffer::pinned(api, stream.device(), 1 << 20)?;
        let hold = testing::hold(api, stream)?;
        {
            let source = Buffer::pinned(api, stream.device(), 1 << 20)?;
            let middle = Buffer::device_memory(api, stream.device(), 1 << 20)?;
            stream.fill(api, &source, Pattern::U8(0x5a))?;
            stream.copy(api, &middle, &source)?;
            stream.copy(api, &result, &middle)?;
        }
        hold.release();
        synchronize(api, stream)?;
        // SAFETY: the buffer is pinned host memory of that size, and the stream is done.
        let bytes = unsafe { std::slice::from_raw_parts(result.ptr() as *const u8, result.len()) };
        assert!(bytes.iter().all(|&byte| byte == 0x5a));
        Ok(())
    });
}

#[test]
fn bad_arguments_are_named_and_nothing_is_queued() {
    with_stream(|api, stream| {
        let (small, large) = (Buffer::pinned(api, stream.device(), 4)?, Buffer::pinned(api, stream.device(), 6)?);
        let error = stream.copy(api, &small, &large).unwrap_err().to_string();
        assert!(error.contains('4') && error.contains('6'), "{error}");
        assert!(matches!(stream.fill(api, &large, Pattern::U32(0)), Err(Error::InvalidValue { .. })));
        assert!(stream.query(api)?);
        Ok(())
    });
}

#[test]
fn a_future_resolves() {
    struct Unpark(thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    with_stream(|api, stream| {
        let mut completion = Box::pin(stream.then(api, |_| 11)?);
        let waker = std::task::Waker::from(Arc::new(Unpark(thread::current())));
        let mut context = std::task::Context::from_waker(&waker);
        let value = loop {
            match completion.as_mut().poll(&mut context) {
                std::task::Poll::Ready(value) => break value?,
                std::task::Poll::Pending => thread::park(),
            }
        };
        assert_eq!(value, 11);
        Ok(())
    });
}

#[test]
fn a_per_thread_stream_is_refused_on_another_thread() {
    Api::attach(|api| {
        let stream = Stream::per_thread_default(api, device(api)?)?;
        stream.completion(api)?.into_result(None)?;
        let elsewhere = thread::spawn(move || Api::attach(|api| stream.query(api))).join().unwrap();
        assert!(matches!(elsewhere, Ok(Err(Error::InvalidValue { .. }))));
        Ok::<(), Error>(())
    })
    .unwrap()
    .unwrap();
}

/// One million on the software device, 200,000 on a GPU; `RSTREAM_STRESS` sets another number.
#[test]
fn every_callback_of_many_runs_exactly_once_and_in_order() {
    const STREAMS: u64 = 16;
    const THREADS: u64 = 4;
    let gpu = std::env::var("RSTREAM_TEST_DEVICE").is_ok_and(|name| name == "gpu");
    let total = std::env::var("RSTREAM_STRESS").map_or(if gpu { 200_000 } else { 1_000_000 }, |n| n.parse().unwrap());
    let each = total / STREAMS;
    let start = Arc::new(Barrier::new(4));
    let threads = (0..THREADS).map(|_| {
        let start = Arc::clone(&start);
        thread::spawn(move || {
            Api::attach(|api| {
                let device = device(api)?;
                let lanes = (0..STREAMS / THREADS)
                    .map(|_| Ok((Stream::new(api, device, StreamOptions::default())?, Arc::new(AtomicU64::new(0)))))
                    .collect::<rstream::Result<Vec<_>>>()?;
                let disorder = Arc::new(AtomicU64::new(0));
                start.wait();
                for number in 0..each {
                    for (stream, next) in &lanes {
                        let (next, disorder) = (Arc::clone(next), Arc::clone(&disorder));
                        // Exactly once and in order: each finds the number that the one before left.
                        let _result = stream.add_callback(api, move |_| {
                            if next.swap(number + 1, Ordering::AcqRel) != number {
                                disorder.fetch_add(1, Ordering::Relaxed);
                            }
                        })?;
                    }
                }
                for (stream, next) in &lanes {
                    stream.completion(api)?.into_result(None)?;
                    assert_eq!(next.load(Ordering::Acquire), each);
                    assert_eq!(stream.pending(), 0);
                }
                assert_eq!(disorder.load(Ordering::Acquire), 0);
                Ok::<(), Error>(())
            })
        })
    });
    for thread in threads.collect::<Vec<_>>() {
        thread.join().unwrap().unwrap().unwrap();
    }
}

#[test]
fn a_reusable_callback_runs_once_for_each_enqueue_in_order_under_each_signal() {
    Api::attach(|api| {
        for signal in [Signal::Memory, Signal::Driver] {
            let stream = Stream::new(api, device(api)?, StreamOptions { signal, ..StreamOptions::default() })?;
            let seen = Arc::new(Mutex::new(Vec::new()));
            let note = |name: u32| {
                let seen = Arc::clone(&seen);
                move |status: Status| seen.lock().unwrap().push((name, status))
            };
            let reusable = stream.reusable_callback(note(0));
            let held = testing::hold(api, &stream)?;
            // More than a lane queues, so that some go by the driver's callback.
            const EACH: u32 = 400;
            for number in 1..=EACH {
                reusable.enqueue(api)?;
                drop(stream.add_callback(api, note(number))?);
            }
            assert_eq!((reusable.runs(), stream.pending()), (0, 2 * EACH as usize));
            held.release();
            synchronize(api, &stream)?;
            let expected: Vec<_> =
                (1..=EACH).flat_map(|number| [0, number]).map(|name| (name, Status::SUCCESS)).collect();
            assert_eq!(*seen.lock().unwrap(), expected);
            assert_eq!((reusable.runs(), reusable.panics(), stream.pending()), (u64::from(EACH), 0, 0));
        }
        Ok::<(), Error>(())
    })
    .unwrap()
    .unwrap();
}

#[test]
fn a_reusable_callback_lives_until_its_last_run_and_survives_its_panics() {
    with_stream(|api, stream| {
        let owned = Arc::new(AtomicU64::new(0));
        let held = Arc::clone(&owned);
        let reusable = stream.reusable_callback(move |_| {
            assert!(!held.fetch_add(1, Ordering::Relaxed).is_multiple_of(2), "on purpose");
        });
        let hold = testing::hold(api, stream)?;
        for _ in 0..4 {
            reusable.enqueue(api)?;
        }
        let twin = reusable.clone();
        drop(reusable);
        hold.release();
        synchronize(api, stream)?;
        assert_eq!((twin.runs(), twin.panics()), (2, 2));
        let hold = testing::hold(api, stream)?;
        twin.enqueue(api)?;
        drop(twin);
        assert_eq!(Arc::strong_count(&owned), 2);
        hold.release();
        synchronize(api, stream)?;
        assert_eq!((Arc::strong_count(&owned), owned.load(Ordering::Relaxed)), (1, 5));
        Ok(())
    });
}

#[test]
fn a_reusable_callback_is_refused_where_a_callback_is() {
    with_stream(|api, stream| {
        let reusable = stream.reusable_callback(|_| ());
        let capture = stream.begin_capture::<rstream::capture::Relaxed>(api)?;
        assert!(matches!(reusable.enqueue(api), Err(Error::Capture { .. })));
        drop(capture);
        stream.close();
        assert!(matches!(reusable.enqueue(api), Err(Error::Closed { .. })));
        assert_eq!((reusable.runs(), stream.pending()), (0, 0));
        Ok(())
    });
}
