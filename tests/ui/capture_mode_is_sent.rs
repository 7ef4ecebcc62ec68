//! A capture mode is that of a thread.
use rstream::capture::CaptureModeGuard;

fn send(guard: CaptureModeGuard<'static>) {
    std::thread::spawn(move || drop(guard));
}

fn main() {}
