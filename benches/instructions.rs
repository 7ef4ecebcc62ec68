//! The program that `instructions.py` runs under callgrind: `instructions WHAT SIGNAL ROUNDS`, where WHAT is a kind of host
//! code or a call on an idle stream.

mod common;

use std::hint::black_box;
use std::thread;
use std::time::Duration;

use rstream::{Api, Completion, Device, Event, EventOptions, Stream, testing};

use common::{CALLS, Call, Enqueue, KINDS, SIGNALS, new_stream};

/// So many are queued in a round: fewer than the 500 beyond which a stream leaves the memory signal.
const BATCH: usize = 100;

/// Callgrind finds it by its name, and counts what is done in it.
#[inline(never)]
fn measured_enqueue(api: &Api<'_>, stream: &Stream, enqueue: Enqueue) -> Completion<()> {
    black_box(enqueue(api, stream))
}

/// As above.
#[inline(never)]
fn measured_call(api: &Api<'_>, stream: &Stream, event: &Event, call: Call) {
    call(api, stream, event);
    black_box(());
}

fn run(api: &Api<'_>, what: &str, signal: &str, rounds: usize) {
    let device = Device::soft(api, 0).unwrap();
    let (_, signal) = SIGNALS.into_iter().find(|(name, _)| *name == signal).expect("memory or driver");
    let stream = new_stream(api, device, signal);
    let event = Event::new(api, device, EventOptions::default()).unwrap();
    let kind = KINDS.into_iter().find(|(name, _)| *name == what);
    let call = CALLS.into_iter().find(|(name, _)| *name == what);
    for _ in 0..rounds {
        if let Some((_, enqueue)) = kind {
            let hold = testing::hold(api, &stream).unwrap();
            let completions: Vec<_> = (0..BATCH).map(|_| measured_enqueue(api, &stream, enqueue)).collect();
            hold.release();
            // To wait for each would have its dispatch wake this thread up, or not, as it happens.
            while stream.pending() > 0 {
                thread::sleep(Duration::from_micros(100));
            }
            assert!(completions.iter().all(Completion::is_done));
            stream.synchronize(api, None, &mut || false).unwrap();
        } else if let Some((_, call)) = call {
            for _ in 0..BATCH {
                measured_call(api, &stream, &event, call);
            }
        } else {
            panic!("nothing is called {what:?}");
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [what, signal, rounds] = arguments.as_slice() {
        let rounds = rounds.parse().expect("a number of rounds");
        Api::attach(|api| run(api, what, signal, rounds)).unwrap();
    } else {
        println!("benches/instructions.py runs this, under callgrind");
    }
}
