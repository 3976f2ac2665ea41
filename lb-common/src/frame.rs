//! How the engine sees a frame: bounds-checked pointers to headers, wherever the bytes lie.

/// A frame that begins at its link-layer header.
pub trait Frame {
    /// Pointer to a `T` at `offset` bytes from the start, or `None` when it would reach past the bytes
    /// at hand. It may be unaligned: use [`get`] and [`put`], never a reference.
    fn at<T>(&self, offset: usize) -> Option<*mut T>;

    /// VLAN tag (TCI, host order) that the hook keeps beside the bytes, if any.
    fn stripped_tag(&self) -> Option<u16>;

    /// Length of what begins at `network` where the hook has a packet that is longer than its header can say, which says 0
    /// (BIG TCP: Linux 5.19 over IPv6, commit 0fe79f28bfaf; 6.3 over IPv4, commit b1a78b9b9886); 0 for all others.
    fn length_beyond_header(&self, _network: usize) -> u32 {
        0
    }
}

/// Reads a value through a pointer that [`Frame::at`] gave.
///
/// # Safety
/// `pointer` lies wholly within the bytes that `at` checked.
#[inline(always)]
pub unsafe fn get<T: Copy>(pointer: *const T) -> T {
    if cfg!(target_arch = "bpf") {
        // One load of the field's width: the verifier knows about unaligned packet access, and
        // `read_unaligned` would be compiled to a load a byte.
        // SAFETY: the caller vouches for the bounds.
        unsafe { pointer.read() }
    } else {
        // SAFETY: the caller vouches for the bounds.
        unsafe { pointer.read_unaligned() }
    }
}

/// Writes a value through a pointer that [`Frame::at`] gave.
///
/// # Safety
/// `pointer` lies wholly within the bytes that `at` checked.
#[inline(always)]
pub unsafe fn put<T: Copy>(pointer: *mut T, value: T) {
    if cfg!(target_arch = "bpf") {
        // SAFETY: the caller vouches for the bounds.
        unsafe { pointer.write(value) }
    } else {
        // SAFETY: the caller vouches for the bounds.
        unsafe { pointer.write_unaligned(value) }
    }
}

/// Reads one field of a header behind a pointer that [`Frame::at`] gave.
#[macro_export]
macro_rules! field {
    ($header:expr, $field:ident) => {{
        let header = $header;
        // SAFETY: the header lies within the checked bytes, and so do its fields.
        unsafe { $crate::frame::get(&raw const (*header).$field) }
    }};
}

/// Writes one field of a header behind a pointer that [`Frame::at`] gave.
#[macro_export]
macro_rules! set_field {
    ($header:expr, $field:ident, $value:expr) => {{
        let (header, value) = ($header, $value);
        // SAFETY: the header lies within the checked bytes, and so do its fields.
        unsafe { $crate::frame::put(&raw mut (*header).$field, value) }
    }};
}

/// A frame in ordinary memory, for tests and tools.
pub struct Buffer<'a> {
    bytes: &'a mut [u8],
    tag: Option<u16>,
}

impl<'a> Buffer<'a> {
    /// Wraps the bytes of a frame, tags included.
    pub fn new(bytes: &'a mut [u8]) -> Self {
        Self { bytes, tag: None }
    }

    /// The same with a tag that the hook has stripped.
    pub fn with_tag(bytes: &'a mut [u8], tag: u16) -> Self {
        Self {
            bytes,
            tag: Some(tag),
        }
    }
}

impl Frame for Buffer<'_> {
    fn at<T>(&self, offset: usize) -> Option<*mut T> {
        let end = offset.checked_add(size_of::<T>())?;
        // The frame is borrowed mutably for as long as self lives, so handing out a pointer to write
        // through is sound while nobody keeps two of them.
        (end <= self.bytes.len()).then(|| self.bytes[offset..].as_ptr().cast_mut().cast())
    }

    fn stripped_tag(&self) -> Option<u16> {
        self.tag
    }
}
