//! A token belongs to its thread.
use rstream::Api;

fn main() {
    let _ = Api::attach(|api| std::thread::scope(|scope| drop(scope.spawn(move || drop(api)))));
}
