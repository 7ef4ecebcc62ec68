//! With room for one stream that waits on memory: host code of others goes by the driver's callback, behind what is due in
//! their lanes. In a process of its own, since the room is read once and a device is lost.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rstream::{Api, Buffer, Device, Error, Pattern, Result, Signal, Status, Stream, StreamOptions, testing};

fn stream(api: &Api<'_>, device: Device) -> Result<Stream> {
    Stream::new(api, device, StreamOptions { signal: Signal::Memory, ..StreamOptions::default() })
}

/// A stream that takes the room until the hold is released and it is waited for.
fn waiting(api: &Api<'_>, device: Device) -> Result<(Stream, testing::Hold)> {
    let stream = stream(api, device)?;
    let hold = testing::hold(api, &stream)?;
    drop(stream.add_callback(api, |_| ())?);
    Ok((stream, hold))
}

/// A reusable callback by the driver's callback, then a callback in the lane, both behind a fault.
fn order_behind_a_fault(api: &Api<'_>, device: Device) -> Result<()> {
    let (other, room) = waiting(api, device)?;
    let stream = stream(api, device)?;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let note = |name: &'static str| {
        let seen = Arc::clone(&seen);
        move |status: Status| seen.lock().unwrap().push((name, status))
    };
    let hold = testing::hold(api, &stream)?;
    testing::fault(api, &stream, Status::ILLEGAL_ADDRESS.code())?;
    let reusable = stream.reusable_callback(note("first"));
    reusable.enqueue(api)?;
    room.release();
    other.synchronize(api, None, &mut || false)?;
    let last = stream.add_callback(api, note("second"))?;
    hold.release();
    last.into_result(None)?;
    assert_eq!(*seen.lock().unwrap(), [("first", Status::ILLEGAL_ADDRESS), ("second", Status::ILLEGAL_ADDRESS)]);
    Ok(())
}

/// A run of a reusable callback on the driver's thread, while somebody who queues host code on the stream is blocked in the
/// driver, which waits for that run.
fn beside_a_full_queue(api: &Api<'_>, device: Device) -> Result<()> {
    let (other, room) = waiting(api, device)?;
    let stream = stream(api, device)?;
    let hold = testing::hold(api, &stream)?;
    let (entered, inside) = channel();
    let (go, leave) = channel::<()>();
    drop(stream.add_callback(api, move |_| {
        entered.send(()).unwrap();
        leave.recv().unwrap();
    })?);
    let reusable = stream.reusable_callback(|_| ());
    reusable.enqueue(api)?;
    room.release();
    other.synchronize(api, None, &mut || false)?;
    let filler = thread::spawn({
        let stream = stream.clone();
        move || {
            Api::attach(|api| {
                let memory = Buffer::device_memory(api, stream.device(), 64)?;
                for _ in 0..1000 {
                    stream.fill(api, &memory, Pattern::U8(1))?;
                }
                for _ in 0..200 {
                    drop(stream.then(api, |_| ())?);
                }
                Ok::<(), Error>(())
            })
        }
    });
    hold.release();
    inside.recv().unwrap();
    // Until the filler is blocked, or all but: then nothing more is accepted.
    let mut pending = 0;
    while pending != stream.pending() || pending < 3 {
        pending = stream.pending();
        thread::yield_now();
    }
    go.send(()).unwrap();
    stream.synchronize(api, Some(Duration::from_secs(60)), &mut || false)?;
    filler.join().unwrap().unwrap()?;
    assert_eq!(reusable.runs(), 1);
    Ok(())
}

#[test]
fn reusable_callbacks_that_go_by_the_drivers_callback() {
    // SAFETY: this is the only test of the process, and nothing else runs yet.
    unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "1") };
    Api::attach(|api| {
        beside_a_full_queue(api, Device::soft(api, 0)?)?;
        order_behind_a_fault(api, Device::soft(api, 1)?)
    })
    .unwrap()
    .unwrap();
}
