//! What reaches the driver takes a token.
use rstream::Stream;

fn ask(stream: &Stream) {
    let _ = stream.query();
}

fn main() {}
