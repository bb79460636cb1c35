# Debian's mingw-w64 with POSIX threads, for x86-64 Windows.
set(CMAKE_SYSTEM_NAME      Windows)
set(CMAKE_SYSTEM_PROCESSOR AMD64)
set(CMAKE_C_COMPILER       x86_64-w64-mingw32-gcc-posix)
set(CMAKE_CXX_COMPILER     x86_64-w64-mingw32-g++-posix)
set(CMAKE_RC_COMPILER      x86_64-w64-mingw32-windres)
# its headers and libraries, and those of Vulkan that windows.py collects; programs of this machine
set(CMAKE_FIND_ROOT_PATH              /usr/x86_64-w64-mingw32 ${CMAKE_CURRENT_LIST_DIR}/../../build/windows/vulkan)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
# Windows aligns the stack to 16 bytes, and GCC spills vectors of 32 and 64 bytes to it with instructions that fault on other addresses
# (GCC bug 54412). The assembler replaces these by their unaligned forms, which are as fast on aligned addresses.
set(CMAKE_C_FLAGS_INIT   "-Wa,-muse-unaligned-vector-move")
set(CMAKE_CXX_FLAGS_INIT "-Wa,-muse-unaligned-vector-move -include ${CMAKE_CURRENT_LIST_DIR}/windows-amx.h")
